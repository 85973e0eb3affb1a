"""The steps of a run: each begins where all ranks agree to continue; then it is reported, evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic

from spmdrl.algo.metrics import Metrics, histograms, merge_all, scalars, worst_tokens
from spmdrl.checkpoint import Saver
from spmdrl.checkpoint.manifest import folder_of
from spmdrl.config import MismatchLimits
from spmdrl.dist.collectives import gather_objects, merge_over
from spmdrl.learn.correction import exceeded
from spmdrl.model.fused import has_fused_layers
from spmdrl.model.policy import PackedModel
from spmdrl.model.weight_files import few_bits_line, unused_line, unused_names
from spmdrl.report.memory import host_peak_bytes
from spmdrl.report.report import drop_metrics, loading_line, resource_metrics, time_metrics, with_speed
from spmdrl.report.samples import worst_token_rows
from spmdrl.rewards.client import Pending
from spmdrl.rollout.sampler import Sampler
from spmdrl.run import Launch, SettingsT
from spmdrl.step.evaluate import Evaluation, eval_metrics
from spmdrl.step.export import export_adapter, export_hf, written_as
from spmdrl.step.handover import Handover, NoHandover
from spmdrl.step.samples import gather_answers
from spmdrl.types import StopRequested

NO_LIMITS = MismatchLimits()


class Steps(Generic[SettingsT]):
    """Counts the steps of a run, and does what belongs between them; every rank that trains has one.

    A run that is asked to stop does so at the next edge between two phases. A step that has not come to its update is
    given up; one that has is finished except for its evaluation, which the resumed run makes before its first rollouts
    or alongside them.
    """

    def __init__(
        self,
        run: Launch[SettingsT],
        policy: PackedModel,
        saver: Saver,
        handover: Handover | NoHandover,
        sampler: Sampler,
        *,
        warn: MismatchLimits = NO_LIMITS,
        success_at: float = 1.0,
        held_out: Callable[[], Evaluation] | None = None,
        complete: Callable[[list[Pending]], list[Pending]] = list,
        alongside: bool = True,
    ) -> None:
        """`warn`: limits beyond which a step's mismatch is shown to the user; `success_at`: the reward from which a
        held-out answer is right. `held_out` evaluates the policy; None: the sampler answers held-out prompts, whose
        rewards `complete` completes. `alongside`: with the rollouts of the next step, where it can."""
        self._run: Launch[SettingsT] = run
        self._policy, self._saver, self._warn, self._success_at = policy, saver, warn, success_at
        self._handover, self._sampler = handover, sampler
        self._measure, self._complete = held_out or self._answer_held_out, complete
        self._answers: list[Pending] = []  # that are sampled alongside rollouts
        self._asked: int | None = None  # the step whose evaluation they are
        self._is_alongside = alongside and sampler.answers_beside
        self._training = run.meshes.training
        # The last finished step and its metrics: the contents of a checkpoint.
        self._done = run.resume_point.step
        self._measured: dict[str, float] = dict(run.resume_point.metrics or {})
        self._evaluated: dict[str, float] = {}
        self._saved: Metrics = {}  # of the last save, until they are reported
        self._dropped: Mapping[str, int] = {}  # prompts dropped before this step
        self._stopping = False

    def announce(self, others: Iterable[str] = ()) -> None:
        """Show where the run begins, and other lines, and write down what was launched."""
        run, origin = self._run, self._run.resume_point
        if origin.saved_step is not None:
            where = folder_of(origin.folder, origin.step)
            steps = f"step {origin.step} of {run.plan.num_steps}"
            if origin.step > run.plan.num_steps:
                steps = f"step {origin.step}, beyond run.num_steps = {run.plan.num_steps}"
            run.report.message(f"goes on after {steps}, from {where}")
        gaps = run.folder.gap_notes(origin.folder, origin.step) if run.world.is_main else ()
        for note in (*origin.notes, *gaps, *others):
            run.report.message(note)
        if kernels := run.machine["linear_kernels"]:
            chosen = ", ".join(f"{kind.replace('_', ' ')} by {kernel}" for kind, kernel in kernels.items())
            layers = "in C" if run.machine["layers_in_c"] else "by torch, because not every rank has a C compiler"
            others = "norms, rotations, gates and " if has_fused_layers(self._policy.model.config) else ""
            run.report.message(f"linear layers in float32: {chosen}; {others}attention {layers}")
        path = run.cfg.model.path
        for line in (few_bits_line(path), unused_line(unused_names(self._policy.model, path))):
            if line:
                run.report.message(line)
        run.report.message(loading_line(gather_objects(self._training, host_peak_bytes())))
        run.report.expect(run.inputs.phases)
        if run.world.is_main:
            run.folder.write_launch(run.cfg, run.plan, run.machine)

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Surround the loop: save what is finished when the run is asked to stop, and export the model at its end."""
        run, saver = self._run, self._saver
        try:
            yield
        except StopRequested:
            if saver.newest != self._done:
                self._save()
            saver.wait()
            if run.world.is_main:
                run.report.message(run.watch.write_requeue(step=self._done, num_steps=run.plan.num_steps))
            self._sampler.dismiss()
        else:
            saver.wait()
            self._sampler.dismiss()
            if run.cfg.export.at_end:
                self._export(run.folder.hf, run.folder.adapter)
        run.report.compare(scalars(merge_over(self._training, resource_metrics(run.report.take_peaks()))))

    def __iter__(self) -> Iterator[int]:
        """Evaluate the policy that the run begins with, then yield the number of each step that is left.

        Raises StopRequested where the ranks agree to stop.
        """
        run = self._run
        self._evaluate_start()
        while self._done < run.plan.num_steps:
            if run.watch.agree_to_stop_before_step(self._training):
                raise StopRequested
            step = self._done + 1
            run.watch.begin_step(step)
            self._saved, self._dropped = self._saver.check(), run.inputs.prompts.dropped
            yield step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Begin a phase if all ranks agree to continue, and time it. Raises StopRequested on all ranks, or on none."""
        self._pass_edge()
        with self._run.report.span(name):
            yield

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Surround the sampling of a step; reports the evaluation that was sampled alongside it."""
        with self._run.report.span("rollout"), self._handover.rollout():
            yield
        if self._asked is not None:
            with self._run.report.span("eval"):
                self._amend(self._show(self._asked, self._evaluation(self._answers)))
            self._asked = None
            self._stop_if_asked()

    def evaluate(self, step: int) -> None:
        """Evaluate the policy after `step` where that is due, now or alongside the next rollouts; a run that is about
        to stop puts it off."""
        self._stopping = self._run.watch.agree_to_stop(self._training)
        with self._run.report.span("eval"):
            due = self._run.plan.evaluates_after(step) and not self._stopping
            self._evaluated = self._show(step, self._measure()) if due and not self._ask(step) else {}

    def report(
        self, step: int, metrics: Sequence[Metrics], samples: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, float]:
        """Merge the metrics of all ranks, in one collective, and show them; returns the same values on every rank."""
        run = self._run
        merged = merge_over(
            self._training,
            merge_all([*metrics, self._saved])
            | drop_metrics(self._dropped, run.inputs.prompts.dropped)
            | time_metrics(run.report.take_times())
            | resource_metrics(run.report.take_peaks()),
        )
        values = scalars(merged)
        for warning in exceeded(values, self._warn):
            run.report.message(f"step {step}: {warning}")
        worst = worst_tokens(merged).get("mismatch/max_abs_nats", ())
        run.report.step(
            step,
            with_speed(values),
            samples=samples,
            histograms=histograms(merged),
            worst_tokens=worst_token_rows(worst, run.inputs.tokenizer),
        )
        return values

    def finish(self, step: int, values: dict[str, float], *, save: bool = False) -> None:
        """Count the step as done; save where that is due or asked for, export, and stop if the ranks have agreed to."""
        self._done, self._measured = step, values | self._evaluated
        if save or self._run.plan.saves_after(step):
            self._save()
        if self._run.plan.exports_after(step):
            self._export(self._run.folder.hf_after(step), self._run.folder.adapter_after(step))
        self._report_memory()
        for callback in self._run.callbacks:
            callback.on_step(step, values)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._stopping:
            raise StopRequested

    def _evaluate_start(self) -> None:
        """Evaluate the policy that the run begins with, unless its checkpoint has that evaluation; one that rollouts
        had alongside them is then sampled once more in a deterministic run, and not reported."""
        run, is_known = self._run, self._run.resume_point.is_evaluated
        # Where it is known, the rollouts alongside it have the batches and the clock of before the stop.
        due = run.plan.evaluates_after(self._done) and (not is_known or run.cfg.run.deterministic)
        if due and not self._ask(self._done, is_known=is_known) and not is_known:
            self._pass_edge()
            self._amend(self._show(self._done, self._measure()))
            self._stop_if_asked()
        self._report_memory()
        self._run.report.take_times()

    def _ask(self, step: int, *, is_known: bool = False) -> bool:
        """Have an evaluation sampled alongside the rollouts of the next step; False where it is sampled by itself."""
        if not self._is_alongside or step >= self._run.plan.num_steps:
            return False
        self._asked, self._answers = None if is_known else step, []
        self._sampler.ask_held_out(self._answers.extend)
        return True

    def _amend(self, evaluated: dict[str, float]) -> None:
        """Add an evaluation to the metrics of the last step, which may be saved."""
        self._measured |= evaluated
        if self._saver.newest == self._done:
            self._saver.amend(metrics=self._measured)

    def _show(self, step: int, found: Evaluation) -> dict[str, float]:
        evaluated = scalars(merge_over(self._training, found.metrics))
        self._run.report.eval(step, evaluated, samples=found.samples)
        for callback in self._run.callbacks:
            try:
                callback.on_evaluation(step, evaluated)
            except StopRequested:  # the run stops where this evaluation is saved with its step
                self._stopping = True
        return evaluated

    def _answer_held_out(self) -> Evaluation:
        with self._handover.rollout():
            pending = self._sampler.sample_held_out()
        return self._evaluation(pending)

    def _evaluation(self, pending: list[Pending]) -> Evaluation:
        run = self._run
        outcomes, count = run.rewards.collect(self._complete(pending)), len(run.inputs.held_out)
        shown = gather_answers(outcomes, run.inputs.tokenizer, run.cfg.report, self._training, num_prompts=count)
        return Evaluation(eval_metrics(outcomes, success_at=self._success_at), shown)

    def _pass_edge(self) -> None:
        if self._run.watch.agree_to_stop(self._training):
            raise StopRequested

    def _save(self) -> None:
        with self._handover.training(), self._run.report.span("save"):
            self._saver.save(self._done, metrics=self._measured, collector=self._sampler.state(self._done))
        for callback in self._run.callbacks:
            callback.on_save(self._done, folder_of(self._run.folder.checkpoints, self._done))

    def _export(self, model: Path, adapter: Path) -> None:
        run = self._run
        with self._handover.training(), run.report.span("export"):
            export_adapter(self._policy, adapter, run.meshes)
            if run.cfg.export.merged:
                written = written_as(run.cfg.export.dtype, run.dtype)
                export_hf(self._policy, run.inputs.tokenizer, model, run.meshes, **written)

    def _report_memory(self) -> None:
        if edges := self._handover.take_edges():
            self._run.report.memory(self._done, edges)
