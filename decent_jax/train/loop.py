"""The training loop: dispatch a step, then look at the one before it."""

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from decent_jax import json_files, plot, replicas
from decent_jax.cluster import start as cluster
from decent_jax.data import loader, partition
from decent_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    RunError,
    TrainingFailed,
)
from decent_jax.progress import Progress
from decent_jax.text import format_number
from decent_jax.train import algorithm, checkpoint, compile_cache, session
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.evaluation import Evaluator
from decent_jax.train.executables import Executables
from decent_jax.train.profile import Profile


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train as ``config`` says, in the folder ``workdir``; resume what is there.

    Returns:
      What ``summary.json`` holds: final and best evaluation, steps, wall time, versions.

    Raises:
      ConfigError: the config, the data or the working directory cannot be used; nothing has been
        compiled or written.
      TrainingFailed: every replica has failed for ``config.max_failing_steps`` steps.
      Interrupted: after a checkpoint was saved.
    """
    config_lib.validate(config)
    plan = config_lib.load_plan(config)
    if plan is not None:
        config = config_lib.follow_plan(config, plan)
    compile_cache.use()
    started = cluster.start(config)
    fsdp = config.mesh.fsdp
    devices = cluster.choose_devices(config.num_replicas * fsdp, config.mesh.devices)
    if plan is None:
        schedule = config_lib.make_schedule(config)
    else:
        schedule, devices = plan.schedule, cluster.follow_plan(devices, plan)
    try:
        placement = replicas.place(config.num_replicas, devices, fsdp)
    except ValueError as error:
        raise ConfigError(f"mesh.fsdp: {error}") from None
    with session.open_workdir(workdir, config) as work:
        work.say(f"{started}\n{cluster.table(devices[::fsdp], placement.block)}")
        if fsdp > 1:
            work.say(f"a replica is sharded over {fsdp} devices, of which the first is named")
        try:
            task = config_lib.task_module(config.task).make(config, work.path, work.announce)
            shares = _partition(config, task)
        except DataError as error:
            raise ConfigError(str(error)) from None
        if shares is not None:
            work.say(shares.report())
        return _Trainer(config, work, task, placement, schedule, shares).train()


def _partition(config, task) -> partition.Partition | None:
    """Which training records belong to which replica; None: every replica reads all of them.

    It is drawn from the seed at every start, so a resumed run has the same one, and a run that is
    resumed with another number of replicas a new one.
    """
    if config.data.partition == "iid":
        return None
    return partition.for_run(
        task.train_source,
        num_replicas=config.num_replicas,
        batch_size=config.batch_size,
        alpha=config.data.alpha,
        seed=config.seed,
    )


class _Trainer:
    """One run: what it is made of, and its loop."""

    def __init__(self, config, work, task, placement, schedule, shares):
        self.config, self.work, self.task, self.placement = config, work, task, placement
        self.schedule, self.partition = schedule, shares
        epoch = loader.steps_per_epoch(
            task.train_source, config.batch_size, config.num_replicas, config.seed
        )
        self.steps = round(config.epochs * epoch) if config.epochs else config.steps
        if self.steps < 1:
            raise ConfigError(f"{config.epochs} epochs are less than a step, {epoch} are one epoch")
        self.every = config_lib.durations(config, epoch, self.steps)
        warmup = self.every["lr_schedule.warmup"]
        if config.lr_schedule.name == "cosine":
            config_lib.check_warmup(warmup, self.steps)
        drops = config_lib.drops_in_steps(config, epoch, self.steps)
        self.rate = step_lib.learning_rate(config, self.steps, warmup, drops)
        self.tx = algorithm.transformation(
            config, self.schedule, self.rate, task.decay_mask, placement.axis_name
        )
        self._compiled = Executables(
            step_lib.make_step(config, task, self.tx, self.rate, self.schedule, placement),
            self.schedule,
            config.mix_every,
            config.algorithm == "all_reduce",
            self._waiting,
        )
        self.evaluator = Evaluator(
            task,
            placement,
            config.eval.batch_size or config.batch_size,
            config.eval.batches,
            config.data.workers,
        )
        self._summarize = jax.jit(_summarize, out_shardings=placement.replicated)
        self._distance = jax.jit(replicas.consensus_distance, out_shardings=placement.replicated)
        self._average = jax.jit(
            lambda params: placement.place_all(
                replicas.broadcast(replicas.consensus_mean(params), placement.num_replicas)
            ),
            donate_argnums=0,
        )
        self._measured = False  # so that the next time compiles
        self.seconds = 0.0  # of training, over all sessions; without evaluation and saving
        self.best = math.inf
        self.evaluated = {}  # the last evaluation
        self.ahead = 0  # of its steps is the data, where some were done with another batch_size
        self._skipped = np.zeros(config.num_replicas, int)  # updates, by replica, as last said
        self._of_batches = []  # what the task measured of each that no row holds yet
        self._drifting = None  # the replica last said to drift, until it is back

    # --- The run, top-down ----------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """From the newest checkpoint, or the beginning, to the end."""
        config, work = self.config, self.work
        self.checkpoints = checkpoint.Checkpointer(work.path, config.checkpoint.keep)
        try:
            start = self._restore_or_init()
            work.write_config()
            self.writer = work.open_metrics(start)
            if start >= self.steps:
                work.say(f"the run has already ended: {start} of {self.steps} steps are done")
                self.steps = start  # what the state is of, where the config now says fewer
            self.progress = work.progress = Progress(self.steps, start, quiet=work.quiet)
            with self.progress, self.writer, session.Signals() as self.signals:
                self._loop(start)
                if self.evaluated.get("step") != self.steps:
                    self._evaluate(self.steps)
                self.checkpoints.save(self.steps, self.state, self._meta(self.steps))
            with work.announce("waiting until the checkpoint is written"):
                self.checkpoints.wait()
            summary = self._finish()
        except BaseException:
            with contextlib.suppress(CheckpointError):  # what went wrong first is told
                self.checkpoints.close()
            raise
        finally:
            work.progress = None
        self.checkpoints.close()
        return summary

    def _loop(self, start: int) -> None:
        config = self.config
        profile = Profile(config.profile.start, config.profile.count, self.work.path, self.work.say)
        with self._batches(start) as batches, profile:
            batch = self._next_batch(batches, start) if start < self.steps else None
            self._mark = session.Mark(start)
            pending = None  # (steps done, metrics on the device) of the step before
            for t in range(start, self.steps):
                compiled = self._executable(t, batch)
                profile.before_step(t, self.state)
                self.state, step_metrics = compiled(self.state, batch, np.int32(t))
                done = t + 1
                if done < self.steps:
                    batch = self._next_batch(batches, done)
                if pending is not None:
                    self._look_at(*pending)
                logs = done % config.log.every == 0 or done == self.steps
                pending = (done, step_metrics, self._measure(step_metrics) if logs else None)
                saves, evaluates, stops = self._due(done, logs)
                # A bound is acted on at the step it is measured at, whatever else is due then: a
                # resumed run averages where the uninterrupted one does.
                bounded = logs and config.max_consensus_distance > 0
                if saves or evaluates or stops or bounded:
                    self._look_at(*pending)
                    pending = None
                    with self._mark.pause():
                        if evaluates:
                            self._evaluate(done)
                        if saves or stops:
                            self.checkpoints.save(done, self.state, self._meta(done))
                if stops and done < self.steps:
                    self._stop(done)
            profile.before_step(self.steps, self.state)
            if pending is not None:
                self._look_at(*pending)

    def _restore_or_init(self) -> int:
        """Sets ``self.state``; returns the number of steps that are done."""

        def init():
            return step_lib.init_state(self.config, self.task, self.tx, self.placement)

        self._check_algorithm_fits_the_model()
        like = jax.eval_shape(init)
        self.cost = algorithm.cost(self.config, self.schedule, like)
        self.work.say(algorithm.describe(self.config, self.schedule, self.cost))
        found = None
        if self.checkpoints.steps():
            with self.work.announce("restoring the newest checkpoint"):
                found = self.checkpoints.restore_newest(
                    like, self.placement, self.config.accum_steps, say=self.work.say
                )
        if found is None:
            with self.work.announce("creating the replicas"):
                self.state = jax.block_until_ready(init())
            return 0
        self.state, meta = found
        self.seconds, self.best = meta["seconds"], meta["best"]
        counts = jax.jit(jnp.copy, out_shardings=self.placement.replicated)
        self._skipped = np.asarray(counts(self.state.opt_state.skipped))
        step = meta["step"]
        self.ahead = meta["examples"] // self.config.batch_size - step
        if not self.checkpoints.drop_best_after(step):
            self.best = math.inf
        self.work.say(f"resuming after step {step}")
        return step

    def _check_algorithm_fits_the_model(self) -> None:
        """What only the shapes of the parameters can tell, in one sentence and before compiling."""
        params, _ = jax.eval_shape(self.task.init, jax.random.key(0))
        try:
            jax.eval_shape(self.tx.init, params)
        except ValueError as error:
            raise ConfigError(f"algorithm {self.config.algorithm}: {error}") from None

    def _finish(self) -> dict[str, Any]:
        mean, model_state = self.evaluator.mean((self.state.params, self.state.model_state))
        model_state = self.evaluator.consensus_state(mean, model_state)
        tested = {}
        if hasattr(self.task, "test") and not self.work.quiet:
            tested = {"test": self.task.test(_local(mean))}
        summary = self.work.summary(
            steps=self.steps,
            final=self.evaluated,
            best_eval_loss=self.best,
            schedule=self.schedule.name,
            schedule_period=self.schedule.period,
            bytes_sent_per_step=round(self.cost.sent_a_step),
            bytes_sent_by_node_per_step=round(self.cost.sent_by_node),
            state_bytes_per_replica=self.cost.state,
            memory_bytes_per_device=self._compiled.memory and self._compiled.memory._asdict(),
            training_seconds=round(self.seconds, 3),
            partition={"name": "iid"} if self.partition is None else self.partition.summary(),
            **self.task.summary(),
            **tested,
        )
        if self.work.quiet:
            return summary
        try:
            plot.plot_runs([self.work.path])
        except (RunError, OSError) as error:
            self.work.say(f"no curves were drawn: {error}")
        with self.work.announce("looking at the consensus model"):
            text = self.task.demonstrate(*_local((mean, model_state)))
        self.work.say(text)
        for scores in tested.values():
            self.work.say(", ".join(f"{name} {value}" for name, value in scores.items()))
        self.work.say_where(summary)
        return summary

    # --- A step ---------------------------------------------------------------------------------

    def _executable(self, t: int, batch):
        """The program for step ``t``; the first time, what it needs is said."""
        first = self._compiled.memory is None
        compiled = self._compiled(t, self.state, batch)
        if first and self._compiled.memory is not None:
            n, batch_size = self.config.num_replicas, self.config.batch_size
            work = self.task.flops_per_example * batch_size / n
            self.work.say(
                f"a step: {self._compiled.memory}, {format_number(work / 1e9)} GFLOP of the model "
                f"and {format_number(self.cost.sent_a_step / 1e6)} MB sent a replica"
            )
        return compiled

    @contextlib.contextmanager
    def _waiting(self, message: str):
        """A wait that is told, and not counted as training."""
        with self._mark.pause(), self.work.announce(message):
            yield

    def _batches(self, start: int):
        return loader.train_batches(
            self.task.train_source,
            seed=self.config.seed,
            num_replicas=self.config.num_replicas,
            batch_size=self.config.batch_size,
            replicas=self.placement.local_replicas,
            start_step=start + self.ahead,
            prefetch=self.config.data.prefetch,
            workers=self.config.data.workers,
            partition=self.partition,
        )

    def _next_batch(self, batches, done: int):
        """The next batch on its way to the devices; counts the seconds waited for it."""
        began = time.monotonic()
        try:
            block = next(batches)
        except DataError as error:  # found only now: a photograph cut short, say
            self._fail_for_data(done, error)
        if hasattr(self, "_mark"):
            self._mark.data_wait += time.monotonic() - began
        if hasattr(self.task, "measure"):
            self._of_batches.append(self.task.measure(block))
        return self.placement.put(block)

    def _fail_for_data(self, done: int, error: DataError):
        """Keep what ``done`` steps came to, where this process can do so on its own."""
        saved = ""
        if jax.process_count() == 1 and done:
            self.checkpoints.save(done, self.state, self._meta(done))
            self.checkpoints.wait()
            saved = f"; a checkpoint of step {done} is saved"
        raise TrainingFailed(f"{error}{saved}") from None

    def _measure(self, step_metrics):
        """Dispatch the reductions over replicas; nothing is waited for but their compilation."""
        with contextlib.nullcontext() if self._measured else self._mark.pause():
            self._measured = True
            return self._summarize(step_metrics), self._distance(self.state.params)

    def _due(self, done: int, logs: bool) -> tuple[bool, bool, bool]:
        """Whether to save, evaluate and stop after ``done`` steps, the same on all processes."""
        config = self.config
        evaluates = done == self.steps or _divides(self.every["eval.every"], done)
        saves = _divides(self.every["checkpoint.every"], done)
        stops = False
        if jax.process_count() == 1 or logs:  # processes agree where they meet anyway
            minutes = config.checkpoint.every_minutes
            late = minutes > 0 and self.checkpoints.minutes_since_save() >= minutes
            saves |= cluster.any_process(late)
            stops = cluster.any_process(self.signals.received is not None)
        return saves, evaluates, stops

    def _stop(self, done: int) -> None:
        self.checkpoints.wait()
        number = self.signals.received or 15
        self.work.summary(steps=done, interrupted=True, training_seconds=round(self.seconds, 3))
        raise Interrupted(
            f"interrupted after step {done}; a checkpoint is saved, the same command resumes",
            number,
        )

    # --- What a step left behind ----------------------------------------------------------------

    def _look_at(self, done: int, step_metrics, measured) -> None:
        """Wait for a step; where its row is due, write it and act on it."""
        jax.block_until_ready(step_metrics)
        if measured is None:
            self.progress.update(done)
            return
        row, consensus = jax.device_get(measured)
        row = {f"train/{name}": value for name, value in row.items()}
        failing, skipped = int(row.pop("train/failing")), row.pop("train/skipped")
        row["train/consensus_distance"] = float(consensus.distance)
        row["train/consensus_distance_relative"] = float(consensus.relative)
        seconds, steps, data_wait = self._mark.interval(done)
        self.seconds += seconds
        rate = self.config.batch_size * self.task.units_per_example * steps / seconds
        row |= {
            "perf/step_time_s": seconds / steps,
            f"perf/{self.task.unit}_per_s": rate,
            "perf/data_wait_s": data_wait / steps,
            "perf/wall_time_s": self.seconds,
        }
        of_batches, self._of_batches = self._of_batches[:steps], self._of_batches[steps:]
        for name in of_batches[0] if of_batches else ():
            row[name] = float(np.mean([numbers[name] for numbers in of_batches]))
        self._watch(done, consensus, failing, skipped)
        self.writer.write(done, row)
        self.progress.update(
            done,
            {
                "loss": float(row["train/loss"]),
                "consensus": float(consensus.relative),
                f"{self.task.unit}/s": rate,
            },
        )

    def _watch(self, done: int, consensus, failing: int, skipped: np.ndarray) -> None:
        """Say what goes wrong; average once past the bound; give up when nothing works."""
        config = self.config
        new, self._skipped = skipped - self._skipped, skipped
        if new.any():
            self.work.say(
                f"step {done}: {new.sum()} updates were not finite and were skipped (replica "
                f"{new.argmax()} most); {skipped.sum()} since the start"
            )
        if failing >= config.max_failing_steps:
            saved = self.checkpoints.steps()
            last = (
                f"the last checkpoint is of step {saved[-1]}"
                if saved
                else "no checkpoint has been saved"
            )
            raise TrainingFailed(
                f"no replica has made a finite update in the last {failing} steps, up to step "
                f"{done}; {last}. Lower the learning rate, or clip gradients (optimizer.clip_norm)"
            )
        distances = np.asarray(consensus.per_replica)
        median = float(np.median(distances))
        worst = int(distances.argmax())
        # One of n that is far off draws the mean: it is at most n - 1 times as far as the others.
        factor = min(config.log.drift_factor, 0.8 * (config.num_replicas - 1))
        drifts = config.num_replicas > 2 and distances[worst] > factor * median > 0
        drifting, self._drifting = self._drifting, worst if drifts else None
        if drifts and drifting != worst:
            self.work.say(
                f"step {done}: replica {worst} drifts: {format_number(float(distances[worst]))} "
                f"from the consensus model, the median replica {format_number(median)}"
            )
        bound = config.max_consensus_distance
        if bound and not consensus.relative <= bound:
            self.work.say(
                f"step {done}: the consensus distance {format_number(float(consensus.relative))} "
                f"(relative) is past the bound {bound:g}: all replicas are averaged once"
            )
            self.state = self.state._replace(params=self._average(self.state.params))

    def _evaluate(self, done: int) -> None:
        """Evaluate the consensus model; keep it if it is the best so far."""
        config, state = self.config, self.state
        with self.work.announce("evaluating the consensus model", once=True):
            mean, model_state = self.evaluator.mean((state.params, state.model_state))
            result = self.evaluator.consensus(mean, model_state)
            row = {f"eval/{name}": value for name, value in result.items()}
            if state.ema is not None:
                ema = self.evaluator.mean(state.ema)
                result = self.evaluator.consensus(ema, model_state)
                row |= {f"eval/ema_{name}": value for name, value in result.items()}
            if hasattr(self.task, "score"):
                row |= {f"eval/{k}": v for k, v in self.task.score(_local(mean)).items()}
            if config.eval.replicas:
                losses = self.evaluator.each_replica(state.params, state.model_state)
                row["eval/replica_loss_mean"] = float(losses.mean())
                row["eval/replica_loss_best"] = float(losses.min())
                row["eval/replica_loss_worst"] = float(losses.max())
        distance = jax.device_get(self._distance(state.params))
        row["eval/consensus_distance"] = float(distance.distance)
        row["eval/consensus_distance_relative"] = float(distance.relative)
        self.writer.write(done, row)
        self.evaluated = {"step": done, **row}
        self.progress.note(
            f"step {done}: validation loss {row['eval/loss']:.4f} of the consensus model"
        )
        if row["eval/loss"] < self.best:
            self.best = row["eval/loss"]
            self.checkpoints.save_best(done, mean, model_state, {"eval_loss": self.best})

    def _meta(self, done: int) -> dict[str, Any]:
        return {
            "num_replicas": self.config.num_replicas,
            "schedule": self.schedule.name,
            "batch_size": self.config.batch_size,
            "examples": (done + self.ahead) * self.config.batch_size,
            "seconds": self.seconds,
            "best": self.best,
            "config": json_files.flat(self.config),
        }


def _local(tree):
    """Replicated arrays as host arrays."""
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


def _summarize(step_metrics):
    """Per-replica metrics (n,) to what a row of metrics.jsonl holds."""
    loss, skipped = step_metrics["loss"], step_metrics["skipped"]
    fine = jnp.isfinite(loss)
    return {
        "loss": jnp.where(fine, loss, 0).sum() / fine.sum(),
        "loss_max": loss.max(),
        "loss_min": jnp.where(fine, loss, jnp.inf).min(),
        "grad_norm": jnp.where(fine, step_metrics["grad_norm"], 0).sum() / fine.sum(),
        "learning_rate": step_metrics["learning_rate"],
        "skipped_updates": skipped.sum(),
        "skipped": skipped,
        "failing": step_metrics["failing"].min(),
    }


def _divides(every: int, done: int) -> bool:
    return every > 0 and done % every == 0
