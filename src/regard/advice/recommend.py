"""Recommending a plan of layers for a user's model, images, machine and budget, and saying how sure that is.

The steps: measure what each mechanism costs at each layer, and leave out what saves nothing there; let all others learn
the outputs of the layers that they would replace; measure how far each alone changes the output; search plans
within budgets by the sum of these; verify the best end to end, on images that nothing has learned from. What predicts
the accuracy after fine-tuning is the divergence of the output of the whole plan after that learning
(docs/advice.md).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.core import ConfigError, MixerConfig, UnsupportedError
from regard.images.images import Images
from regard.measure.intervals import rank_correlation
from regard.measure.turns import ROUNDS
from regard.mixers.agent import Agent
from regard.mixers.linear import Linear
from regard.mixers.mita.mita import MiTA
from regard.mixers.shared.native import processor_name
from regard.mixers.static_keys.ska import SKA
from regard.mixers.window import Window
from regard.swapping.layer_plan import spell_or_none, write_layer_plan
from regard.swapping.removed import Removed
from regard.swapping.swap import plan_swap

from .answer import Question, Recommendation, VerifiedPlan
from .attention_use import attention_use
from .distill import PLAN, digest
from .doubts import doubts
from .fidelity import AnswerChange, Fidelity, OutputChange, means
from .judges import Judge
from .judges.choose import judge_text, judged_as
from .kept import SECONDS_BETWEEN, Kept
from .layer_costs import OWN, Costs, Usage, layer_costs, measure_usage
from .learning import Distillation, LayerDistillation
from .search import added_cost, additive_loss, as_plan, cost_of, front, of_one_mechanism, spread_out
from .substitutes import Substitutes
from .user_model import UserModel, split_images, tensors

VERIFIED = 8
"""Plans that are verified end to end."""
SINGLE = 3
"""Of these, plans of one mechanism: what changes lose together is not what they lose alone."""
VERIFYING, LEARNING = 0.25, 0.6
"""The largest share of the time for verifying, and of the rest the share for learning; each change alone has what is
left."""
FEWEST_IMAGES, ENOUGH_STEPS = 4, 60
"""Of a step of learning, and steps, below which images are left out rather than steps."""
MOST_PIXELS = 2**20
"""Of the images that are judged together, so that few large ones take no longer than many small ones."""
STATE, PAGE = "advice.state", "advice.html"

Report = Callable[[str], None]
LayerErrors = Mapping[tuple[str, MixerConfig], OutputChange]


def candidates(model: UserModel, where: str = "*", *, reinitialise: bool = False) -> tuple[MixerConfig, ...]:
    """Mechanisms that are tried unless the user names others: each of another kind, and no attention at all.

    Their numbers suit the layer with the fewest tokens: a landmark for about nine tokens, 64 at most (25 at 14 x 14, as
    in the paper of MiTA). Raises: SwapError if the model has no attention that can be replaced.
    """
    sites = plan_swap(model.network, Removed(), where, model.example, model.ports, reinitialise=reinitialise).sites
    grids = [site.layer.mixer.site.grid for site in sites]
    landmarks = min(max(1, min(8, round(math.sqrt(grid.cells) / 3))) ** 2 for grid in grids)
    window = min(7, *(side - 1 + side % 2 for grid in grids for side in (grid.height, grid.width)))
    return (MiTA(m=landmarks, k=landmarks), Agent(m=landmarks), Linear(), SKA(), Window(size=window), Removed())


def recommend(
    model: UserModel, images: Images, question: Question, *, folder: Path | None = None, report: Report | None = None
) -> Recommendation:
    """The plan that changes the output of a model least within a budget, found in about `question.minutes`.

    folder: gets the plan, plan.json, which `regard.swap` takes, and keeps what was learned and measured, so that the
    same question goes on after an interruption; None keeps nothing. report: called with a line of text at each step.
    The model is not changed.
    Raises: SwapError if nothing can be replaced, UnsupportedError if its output cannot be judged, StoreError for a
    damaged state, ConfigError, MissingExtra.
    """
    names = [] if folder is None or (folder / STATE).exists() else [folder / name for name in (PLAN, PAGE)]
    if others := [str(path) for path in names if path.exists()]:
        raise ConfigError(f"{others[0]} is there already, and of no advice in its folder: choose another folder")
    work = _Work(model, model.judges(), images, question, folder, report or (lambda text: None))
    try:
        result = work.answer()
    finally:
        work.substitutes.close()
    if folder is not None and result.best.spelling:
        write_layer_plan(result.best.choice, folder / PLAN, model.label)
    elif folder is not None:  # the plan of an earlier question would contradict this answer
        (folder / PLAN).unlink(missing_ok=True)
    return result


class _Work:
    """The steps of one question; what is known so far is `kept`, by the names costs, usage, judging, layers, learned,
    alone and images."""

    def __init__(
        self, model: UserModel, judges: Sequence[Judge], images: Images, question: Question, folder: Path | None,
        report: Report,
    ) -> None:  # fmt: skip
        if not question.mixers:
            question = replace(question, mixers=candidates(model, question.where, reinitialise=question.reinitialise))
        self.model, self.judges, self.question, self.report = model, judges, question, report
        self.learned, self.judged = split_images(images)
        file = None if folder is None else folder / STATE
        self.kept = Kept(file, _key(model, images, question), lambda text: report(f"{text}, and is replaced"))
        self.known = self.kept.content
        self.substitutes = Substitutes(
            model.network, question.mixers, model.example, question.where, model.ports,
            reinitialise=question.reinitialise,
        )  # fmt: skip
        if self.known:
            report(f"continuing what {self.kept.file} holds")
        else:
            self.kept.write()  # what cannot be written is refused before minutes of work

    def _seconds_left(self) -> float:
        """Seconds of the time that the user gave."""
        return max(0.0, 60 * self.question.minutes - self.kept.seconds)

    def _say(self, text: str) -> None:
        self.report(f"{text} [{self._seconds_left() / 60:.1f} of {self.question.minutes:g} minutes left in all]")

    def answer(self) -> Recommendation:
        device = next(self.model.network.parameters()).device
        judged = self.model.prepare(tensors(self.judged), device)
        start = time.monotonic()
        self.report(judged_as(self.judges))
        self._say(f"the original's outputs of {len(judged)} images")
        together = max(1, min(16, MOST_PIXELS // (math.prod(self.model.size) * max(self.model.frames, 1))))
        fidelity = Fidelity(self.substitutes, judged, self.judges, together)
        once = time.monotonic() - start
        self._say(f"{len(self.substitutes.names)} layers, {len(self.question.mixers)} mechanisms")
        costs, own = self._costs(judged)
        if own.memory is None and self.question.budget.kind == "memory":
            raise UnsupportedError("this system does not tell the peak memory: take --budget latency=... or macs=...")
        self._drop_expensive(costs)
        self._say("where attention looks, on a few images")
        some = judged[torch.linspace(0, len(judged) - 1, min(4, len(judged))).long()]  # of several classes
        use = attention_use(self.model, some)
        verifying, verified_on = self._verification_scope(fidelity, once)
        steps = self._learn(verifying, fidelity)
        alone = self._alone(fidelity, verifying)
        plans, usage = self._verify(verified_on, judged, costs, own, means(alone))
        best, met = self._best(plans)
        rated = [plan for plan in plans[1:] if plan.loss < math.inf]
        result = Recommendation(
            model=self.model.label, budget=self.question.budget, plans=tuple(plans), best=best, met=met, alone=alone,
            costs=costs, usage=usage, use=use, refused=self.substitutes.refused, steps=steps,
            images=(len(self.learned), sum(map(len, verified_on.batches))), batch=self.question.batch,
            seconds=self.kept.seconds, judge=self.judges[0], clock=_clock(device), looked_at=len(some),
            correlation=rank_correlation([plan.predicted for plan in rated], [plan.loss for plan in rated]),
        )  # fmt: skip
        return replace(result, doubts=tuple(doubts(result, self.model)))

    def _costs(self, judged: Tensor) -> tuple[Costs, Usage]:
        """Of each mechanism at each layer, and of the model as it is."""
        mixers = {spell_or_none(mixer): mixer for mixer in self.question.mixers}
        if "costs" not in self.known:
            self._say("measuring time and memory of each mechanism at each kind of layer")
            seconds = min(0.3, 0.1 * self._seconds_left() / (10 * (1 + len(mixers))))
            batch = self._timing_batch(judged)
            costs = layer_costs(self.substitutes, batch, seconds, lambda name: self._say(f"costs: {name}"))
            self.known["costs"] = {
                name: [("" if mixer is OWN else spell_or_none(mixer), *astuple(usage)) for mixer, usage in row.items()]
                for name, row in costs.items()
            }
            own = measure_usage(self.substitutes, {"": {}}, batch, self._seconds_of_a_plan())[""]
            self.known["usage"] = astuple(own)
            self.kept.write()
        return {
            name: {mixers[text] if text else OWN: Usage(*usage) for text, *usage in row}
            for name, row in self.known["costs"].items()
        }, Usage(*self.known["usage"])

    def _timing_batch(self, judged: Tensor) -> Tensor:
        """The images of a pass whose time and memory are measured."""
        number = self.question.batch
        return judged[:number] if len(judged) >= number else judged[:1].expand(number, -1, -1, -1)

    def _seconds_of_a_plan(self) -> float:
        return min(1.0, 0.05 * 60 * self.question.minutes / VERIFIED)

    def _drop_expensive(self, costs: Costs) -> None:
        """Forget what saves nothing at its layer: no plan has it, so it need not learn."""
        kind, dropped = self.question.budget.kind, 0
        for name, row in costs.items():
            for mixer, usage in row.items():
                if mixer is not OWN and cost_of(usage, kind) >= cost_of(row[OWN], kind):
                    self.substitutes.drop(name, mixer)
                    dropped += 1
        if dropped:
            self._say(f"left out: {dropped} of {sum(map(len, costs.values())) - len(costs)} changes save nothing")

    def _verification_scope(self, fidelity: Fidelity, once: float) -> tuple[float, Fidelity]:
        """The seconds that verifying plans will take, and the images for it: fewer where the time is short.

        once: seconds of a pass over all images. The number of images is chosen once: an answer from what is known, or
        after an interruption, judges by the same ones.
        """
        images = sum(map(len, fidelity.batches))
        timing = (ROUNDS + 3) * self.question.batch * torch.get_num_threads()  # times are measured on one thread
        if "judging" not in self.known:
            number = VERIFYING * self._seconds_left() / VERIFIED / max(once / images, 1e-9) - timing
            self.known["judging"] = max(1, min(len(fidelity.batches), int(number / len(fidelity.batches[0]))))
        part = fidelity.part(0, self.known["judging"])
        return VERIFIED * once / images * (timing + sum(map(len, part.batches))), part

    def _learn(self, verifying: float, fidelity: Fidelity) -> int:
        """Learn the outputs of the original's layers; returns the number of steps that were made."""
        how = Distillation(steps=self.question.steps)
        if "steps" not in self.known:
            seconds = LEARNING * max(0.0, self._seconds_left() - verifying)
            self.known |= {"seconds": 1.1 * seconds, **self._affordable(how, seconds)}
        how = replace(how, steps=self.known["steps"], batch=self.known.get("batch", how.batch))
        distillation = LayerDistillation(self.substitutes, self.model, self.learned, how)
        if "learned" in self.known:
            distillation.resume(self.known["layers"])
        else:
            first = fidelity.part(0, 1)
            before, errors = {key: value.clone() for key, value in self.substitutes.weights().items()}, first.outputs()
            self.kept.learn(distillation, "layers", self._say, self.known["seconds"])
            self._undo(before, errors, first.outputs())
            self.known |= {"layers": distillation.state() | {"moments": {}}, "learned": distillation.step}
            self.kept.write()
        return distillation.step

    def _undo(self, before: Mapping[str, Tensor], then: LayerErrors, now: LayerErrors) -> None:
        """Give the substitutes that learning led away from the layers their weights of before, which few steps do where
        a mechanism starts from the host's own weights."""
        worse = {
            f"{name}|{spell_or_none(mixer)}|"
            for name, mixer in then
            if _error(now, name, mixer) > _error(then, name, mixer)
        }
        kept = self.substitutes.weights()
        self.substitutes.load_weights(
            {key: before[key] if any(map(key.startswith, worse)) else value for key, value in kept.items()}
        )
        if worse:
            self._say(f"{len(worse)} of {len(then)} changes are as before learning, which led them away")

    def _affordable(self, how: Distillation, seconds: float) -> dict[str, int]:
        """Steps, and images of each, that fit into the time: first fewer images are taken, then fewer steps."""
        if not how.steps:
            return {"steps": 0, "batch": how.batch}
        self._say("a trial of learning")
        images = seconds / self._seconds_of_an_image(how)
        batch = max(FEWEST_IMAGES, min(how.batch, int(images / min(how.steps, ENOUGH_STEPS))))
        return {"steps": max(1, min(how.steps, int(images / batch))), "batch": batch}

    def _seconds_of_an_image(self, how: Distillation) -> float:
        """That learning from it takes; the substitutes are as before."""
        before = {key: value.clone() for key, value in self.substitutes.weights().items()}
        trial = LayerDistillation(
            self.substitutes, self.model, self.learned, replace(how, steps=1, batch=FEWEST_IMAGES)
        )
        start = time.monotonic()
        trial.run()
        self.substitutes.load_weights(before)
        return max(1e-6, (time.monotonic() - start) / FEWEST_IMAGES)

    def _alone(self, fidelity: Fidelity, verifying: float) -> dict[tuple[str, MixerConfig], AnswerChange]:
        """Each change alone, all on the same images: as many batches as the time allows, one at least."""
        pairs = [(name, mixer) for name, layers in self.substitutes.layers.items() for mixer in layers]
        known = self.known.setdefault("alone", {f"{name}|{spell_or_none(mixer)}": [] for name, mixer in pairs})
        rows = list(known.values())
        shown = time.monotonic()
        for number in range(0 if "images" in self.known else len(fidelity.batches)):
            part = fidelity.part(number, number + 1)
            for row, (name, mixer) in enumerate(pairs):
                if number and self._seconds_left() < verifying:
                    break
                if len(rows[row]) > number:
                    continue
                change = part.of_plan({name: mixer})
                rows[row].append([change.distance.tolist(), change.agrees.tolist()])
                if time.monotonic() > shown + SECONDS_BETWEEN:
                    self._say(
                        f"each change alone: {row + 1} of {len(pairs)}, batch {number + 1} of {len(fidelity.batches)}"
                    )
                    shown = time.monotonic()
                    if self.kept.due:
                        self.kept.write()
        self.known.setdefault("images", min(map(len, rows), default=0))
        self.kept.write()
        return {
            pair: AnswerChange.of(*(sum(part, []) for part in zip(*row[: self.known["images"]], strict=True)))
            for pair, row in zip(pairs, rows, strict=True)
        }

    def _verify(
        self, fidelity: Fidelity, judged: Tensor, costs: Costs, own: Usage, losses: dict[str, dict[MixerConfig, float]]
    ) -> tuple[list[VerifiedPlan], Usage]:
        """Plans with what is measured of the whole model, and the usage of the model as it was beside them."""
        kind = self.question.budget.kind
        choices = front(losses, costs, kind)
        total = cost_of(own, kind)
        at = (self.question.budget.share - 1) * total
        single = of_one_mechanism(losses, costs, kind, at)[:SINGLE]
        spread = spread_out(choices, costs, kind, VERIFIED - len(single), at)
        chosen = sorted(
            [*spread, *(each for each in single if each not in spread)], key=lambda c: -added_cost(c, costs, kind)
        )
        self._say(f"verifying {len(chosen)} of {len(choices)} plans end to end")
        plans = {str(row): as_plan(choice) for row, choice in enumerate(chosen)}
        usage = measure_usage(self.substitutes, plans, self._timing_batch(judged), self._seconds_of_a_plan())
        first = usage["0"]
        results = []
        for row, choice in enumerate(chosen):
            change, used = fidelity.of_plan(plans[str(row)]), usage[str(row)]
            results.append(
                VerifiedPlan(
                    choice=plans[str(row)], predicted=additive_loss(choice, losses), divergence=change.divergence,
                    agreement=change.agreement, latency=used.seconds / first.seconds,
                    memory=used.memory / first.memory if used.memory is not None and first.memory else None,
                    macs=used.macs / first.macs, expected=1 + added_cost(choice, costs, kind) / max(total, 1e-12),
                )
            )  # fmt: skip
            mean = f"{change.divergence.mean:.3g}{self.judges[0].unit}"
            self._say(f"verified {row + 1} of {len(chosen)}: divergence {mean}")
        return results, first

    def _best(self, plans: Sequence[VerifiedPlan]) -> tuple[VerifiedPlan, bool]:
        """The plan within the budget whose output changes least; else the cheapest. And whether it is within."""
        kind, share = self.question.budget.kind, self.question.budget.share
        within = [plan for plan in plans if plan.share(kind) <= share]
        if within:
            return min(within, key=lambda plan: plan.loss), True
        return min(plans, key=lambda plan: plan.share(kind)), False


def _error(errors: LayerErrors, name: str, mixer: MixerConfig) -> float:
    """The mean over images; infinite for an output that is no number."""
    return float(np.nan_to_num(errors[name, mixer].error, nan=math.inf).mean())


def _clock(device: torch.device) -> str:
    """What times are of."""
    if device.type == "cuda":
        return f"CUDA events, {torch.cuda.get_device_name(device)}"
    return f"CPU time of one thread, {processor_name('model name')}"


def _key(model: UserModel, images: Images, question: Question) -> str:
    """Of all that is kept: the share of the budget is not part of it, so that another one is answered at once; the
    device is, as times are of it."""
    mixers = ";".join(map(spell_or_none, question.mixers))
    where = question.where + ("|reinitialise" if question.reinitialise else "")
    asked = f"{question.budget.kind}|{mixers}|{where}|{question.batch}|{question.steps}|{question.minutes}"
    machine = f"{next(model.network.parameters()).device}|{torch.__version__}"
    return f"{digest(model.network, images)}|{model.label}|{model.size}|{judge_text(model.judge)}|{asked}|{machine}"
