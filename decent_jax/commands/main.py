"""The commands of this project under one name: ``decent-jax COMMAND ...``."""

import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator

from decent_jax.ground import extras, machine
from decent_jax.ground.command_line import CONFIGS
from decent_jax.ground.errors import ConfigError, Foreseen, PeerLost, TrainingFailed, unforeseen
from decent_jax.ground.extras import Unavailable
from decent_jax.ground.format import shorten, shown
from decent_jax.monitor import goodput_file

# name: (module with the command's `main`, what it does).
COMMANDS = {
    "train": ("", "train a model on replicas that gossip"),
    "sample": ("commands.sample", "continue a prompt with a trained model"),
    "translate": ("commands.translate", "translate sentences with a trained model"),
    "export": ("commands.export", "write a trained model as .safetensors"),
    "status": ("commands.status", "show the progress and the failures of a run"),
    "plot": ("commands.plot", "draw the curves of a run, or compare several"),
    "prepare": ("commands.prepare", "turn text, images or sentence pairs into a data folder"),
    "supervise": ("commands.supervise", "start processes, and restart them when one is lost"),
    "preflight": ("commands.preflight", "check the processes of a cluster and measure its links"),
    "planner": ("planner.__main__", "predict step times and recommend a schedule"),
    "peers": ("peers.__main__", "replay or resize a run of asynchronous peers"),
}
# These check for missing extras themselves; all others need at least a config reader.
OWN_NEEDS = ("status", "plot", "prepare", "planner")

EXAMPLES = """\
Train a small model on Python's standard library, plot its curves and use it (one to four minutes):
  decent-jax train --config quickstart --workdir runs/quickstart
  decent-jax plot runs/quickstart
  decent-jax sample --workdir runs/quickstart --prompt "def main("

Train on your own text, with your own config:
  decent-jax prepare text --input PATH --out data/mine --tokenizer bytes --val_fraction 0.01
  decent-jax train --config quickstart --config.data.path=data/mine --workdir runs/mine
  decent-jax train --config my_config.py --workdir runs/my

`decent-jax COMMAND --help` explains a command; `decent-jax train --config NAME --show` prints every
field of a config with its meaning. The configs included in the package:
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code, or 2 if there is no such command."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=3, cutoff=0.3) or COMMANDS
        hint = f"the nearest are {', '.join(near)}; --help lists all"
        print(f"decent-jax: there is no command {shown(name)}; {hint}", file=sys.stderr)
        return 2
    if name == "train":
        return train(rest, "decent-jax train")
    try:
        if name not in OWN_NEEDS:
            extras.need("train", "ml_collections", "tqdm")
        command = import_module(f"decent_jax.{COMMANDS[name][0]}")
    except (Unavailable, ConfigError) as error:
        print(f"decent-jax {name}: {error}", file=sys.stderr)
        return 2
    try:
        return command.main(rest)
    except BrokenPipeError:  # see `console`
        raise
    except KeyboardInterrupt:
        said, code = "interrupted", 130
    except Exception as error:
        said, code = unforeseen(error), 1
    print(f"decent-jax {name}: {said}", file=sys.stderr)
    return code


def import_module(name: str) -> types.ModuleType:
    """Import a module; raises ConfigError if jax refuses an environment variable on import.

    Ctrl-C ends the process at once. Python would ignore a KeyboardInterrupt that arrives while the
    garbage collector calls jax, which happens often during imports.
    """

    def leave_at_once(number, frame):
        os.write(2, b"decent-jax: interrupted\n")
        os._exit(128 + signal.SIGINT)

    alone = threading.current_thread() is threading.main_thread()
    raises = alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if raises:
            signal.signal(signal.SIGINT, leave_at_once)
        return importlib.import_module(name)
    except ValueError as error:
        raise ConfigError(f"an environment variable cannot be used: {error}") from None
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def console() -> None:
    """Entry point of the installed ``decent-jax``: runs `main` and exits with its code."""
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that show only ASCII
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # broken pipe, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        code = 128 + signal.SIGPIPE
    leave(code)


def train(argv: list[str], prog: str) -> int:
    """Train as specified by the command line ``argv``; ``prog`` prefixes the messages.

    Returns 0 when done, 1 if training failed, 2 if it never started, 75 if another process was
    lost, and 128 + signal if it was interrupted.
    """
    open_streams()
    with sigterm_told(prog):
        return _train(argv, prog)


def _train(argv: list[str], prog: str) -> int:
    workdir = None
    try:
        training = import_module("decent_jax.train")
        from decent_jax.monitor import goodput
        from decent_jax.train import flags

        config, workdir = flags.parse(argv, prog)
        if workdir is None:
            training.dry_run(config)
        else:
            with goodput.session(machine.process_seconds()):
                training.run(config, workdir)
    except (Foreseen, Unavailable) as error:
        said, code = str(error), error.code
    except OSError as error:  # a full disk, a removed folder
        what = shorten(f"{type(error).__name__}: {error}", 200)  # not all errors name a file
        said = f"{what}, with --workdir {workdir}; once fixed, the same command resumes"
        code = 1
    except KeyboardInterrupt:  # outside the loop, which saves before it exits
        said, code = "interrupted; the same command resumes", 130
    except Exception as error:  # in the user's task or optimizer, for instance
        said, code = unforeseen(error), 1
    else:
        return 0
    print(f"{prog}: {said}", file=sys.stderr)
    if workdir is not None and code in (TrainingFailed.code, PeerLost.code):
        goodput_file.add_incident(workdir, said)
    return code


@contextlib.contextmanager
def sigterm_told(prog: str) -> Iterator[None]:
    """In this context, SIGTERM ends the process at once, with a message and exit code 143.

    This also works during a long C++ call, such as a compilation: a thread waits for the signal,
    whereas Python's handler would run only after the call. Other code may set its own handler
    meanwhile; the training loop's handler saves a checkpoint first.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def noted(number, frame):
        pass

    def mask(how):
        if signal.getsignal(signal.SIGTERM) is noted:
            signal.pthread_sigmask(how, {signal.SIGTERM})

    def of_a_child():  # such as a data reader, which handles its own signals
        if signal.getsignal(signal.SIGTERM) is noted:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait():
        while number := os.read(reading, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is noted:
                print(f"{prog}: interrupted; the same command resumes", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)
        os.close(reading)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, noted)
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=of_a_child,
    )
    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        if signal.getsignal(signal.SIGTERM) is noted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(writing)


def open_streams() -> None:
    """Redirect to the null device the standard streams that a launcher has closed.

    Otherwise, `print` fails, and the output of libraries ends up in the next file to be opened.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115


def leave(code: int) -> None:
    """Exit, even if other processes of the run are gone and jax would wait for them.

    After a signal, this does not wait for threads that still compile.
    """
    if code and "decent_jax.cluster.watch" in sys.modules:  # otherwise nothing is watched
        from decent_jax.cluster import watch

        watch.leave(code)
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            watch.exit_at_once(code)
    sys.exit(code)


def _help() -> str:
    lines = ["usage: decent-jax COMMAND ...", ""]
    lines += ["Data-parallel training without all-reduce: replicas that gossip.", ""]
    lines += [f"  {name:<10} {does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join([*lines, "", EXAMPLES + "  " + ", ".join(CONFIGS)])


if __name__ == "__main__":
    console()
