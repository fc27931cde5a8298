"""How many files a training step goes through: the way of a batch, measured on a tiny run.

    python benchmarks/walk.py [--list]

Trains a GPT of some thousand parameters for 12 steps over one_peer_exp on 4 simulated devices, and
records every call of a Python function of decent_jax, on all threads. Prints calls, functions,
files and changes of file: until step 0 is traced, while it is traced, in one steady step (from
one row of metrics.jsonl to the next), and the union. ``--list`` also names the files.
"""

import collections
import inspect
import itertools
import sys
import tempfile
import threading
import time
from pathlib import Path

import decent_jax

PACKAGE = str(Path(decent_jax.__file__).parent) + "/"
STEADY = 8  # the step whose row ends the steady phase


class Recorder:
    """Calls of functions of the package.

    Attributes:
      calls: (time, thread, file, function) of each.
      stacks: the files of the functions that each was called from.
      traced: when step 0 was traced, and on which thread.
      rows: when each row of metrics.jsonl was written.
    """

    def __init__(self):
        self.calls: list[tuple[float, int, str, str]] = []
        self.stacks: list[set[str]] = []
        self.traced: tuple[float, float, int] | None = None
        self.rows: dict[int, float] = {}

    def profile(self, frame, event, _) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        # The bodies of modules and classes run when they are imported; they are no functions.
        if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        name = code.co_filename.removeprefix(PACKAGE)
        if event == "call":
            self.calls.append((time.monotonic(), threading.get_ident(), name, code.co_qualname))
            files = set()
            while frame := frame.f_back:
                files.add(frame.f_code.co_filename)
            self.stacks.append({x.removeprefix(PACKAGE) for x in files if x.startswith(PACKAGE)})
        elif code.co_qualname == "MetricWriter.write":
            self.rows[int(frame.f_locals["step"])] = time.monotonic()

    def listen(self, event: str, duration_secs: float, **details) -> None:
        """A listener of `jax.monitoring`: when the first step was traced."""
        if event == "/jax/core/compile/jaxpr_trace_duration" and details.get("fun_name") == "step":
            now = time.monotonic()
            thread = threading.get_ident()
            self.traced = self.traced or (now - duration_secs, now, thread)

    def phases(self) -> dict[str, list[tuple[float, int, str, str]]]:
        assert self.traced is not None
        begin, end, thread = self.traced
        return {
            "until the first step": [call for call in self.calls if call[0] < begin],
            "tracing step 0": [
                call for call in self.calls if begin <= call[0] <= end and call[1] == thread
            ],
            "a steady step": [
                call for call in self.calls if self.rows[STEADY - 1] < call[0] <= self.rows[STEADY]
            ],
            "until the last row": [
                call for call in self.calls if call[0] <= self.rows[max(self.rows)]
            ],
        }

    def way(self) -> set[str]:
        """The files of a batch's way: those that lead to the traced step, its own, and those of
        a steady step."""
        phases = self.phases()
        traced = set(phases["tracing step 0"])
        leading = [
            stack for call, stack in zip(self.calls, self.stacks, strict=True) if call in traced
        ]
        own = {call[2] for name in ("tracing step 0", "a steady step") for call in phases[name]}
        return own.union(*leading)


def changes_of_file(calls: list[tuple[float, int, str, str]]) -> int:
    """How often the next call on the same thread is in another file."""
    threads = collections.defaultdict(list)
    for _, thread, name, _ in calls:
        threads[thread].append(name)
    return sum(a != b for names in threads.values() for a, b in itertools.pairwise(names))


def write_config(folder: Path) -> Path:
    """A config file for train.py, and the data it names."""
    from decent_jax.data.text import token_folder, tokenizers

    tokenizer = tokenizers.load("bytes")
    with token_folder.TokenFolderWriter(folder / "data", tokenizer) as writer:
        writer.add("train", tokenizer.encode("to be or not to be " * 200))
        writer.add("val", tokenizer.encode("that is the question " * 10))
        writer.commit()
    path = folder / "tiny.py"
    path.write_text(f"""
from decent_jax import train

def get_config():
    config = train.default_config()
    config.num_replicas, config.batch_size, config.steps = 4, 8, 12
    config.data.path = {str(folder / "data")!r}
    config.model.update(layers=1, heads=2, width=16, context=8, bias=False, dtype="float32")
    config.lr_schedule.warmup = 2
    config.eval.every, config.log.every = 0, 1
    return config
""")
    return path


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        config = write_config(folder)
        sys.path.insert(0, str(Path(PACKAGE).parent))
        import jax

        import train

        jax.config.update("jax_num_cpu_devices", 4)

        recorder = Recorder()
        jax.monitoring.register_event_duration_secs_listener(recorder.listen)
        threading.setprofile(recorder.profile)
        sys.setprofile(recorder.profile)
        code = train.main(["--config", str(config), "--workdir", str(folder / "run")])
        sys.setprofile(None)
        threading.setprofile(None)
        if code:
            sys.exit(code)
    print(f"{'':<24}{'calls':>8}{'functions':>11}{'files':>7}{'changes of file':>17}")
    for phase, calls in recorder.phases().items():
        functions = {call[2:] for call in calls}
        files = collections.Counter(call[2] for call in calls)
        print(
            f"{phase:<24}{len(calls):>8}{len(functions):>11}{len(files):>7}"
            f"{changes_of_file(calls):>17}"
        )
        if "--list" in arguments:
            for name in sorted(files):
                names = sorted({call[3] for call in calls if call[2] == name})
                print(f"    {name:<34}{', '.join(names)[:300]}")
    way = recorder.way()
    print(f"{'the way of a batch':<43}{len(way):>7}")
    if "--list" in arguments:
        print("    " + ", ".join(sorted(way)))


if __name__ == "__main__":
    main(sys.argv[1:])
