"""Sequences: classification of long sequences of symbols, the tasks of the Long Range Arena (MiTA, Table 5)."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import ConfigError, DataError, MixerConfig
from regard.files.data_record import names_digest
from regard.images.order import Part, check_parts
from regard.mixers.spelling import spell
from regard.models.catalog import user_ports
from regard.models.create import create_model, parse_host
from regard.swapping.swap import remove

from ..base import Prediction, Record, Samples, Score, Training, Trial
from ..class_scores import best_classes, check_classes, check_kept_test, majority, top1_score
from ..image_task import same_data
from ..text_inputs import file_of, read_lines
from ..validation import ValidationPart
from . import data as data_sets
from . import inputs, pathfinder, pixels
from .baseline import bag_of_symbols
from .batches import TokenBatches, evaluation_batches, tensors
from .tokens import SequenceSet, Split, Tokens

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("regard.data")

LEFT_TO_DATA = ("num_classes", "length", "vocabulary", "pairs", "mask")
"""Options of the host that the task sets."""
RECORDED = ("alphabet", "vocabulary", "padded", "pairs")
"""Fields of `Facts` in the record of a run."""
EPOCHS = {"listops-mini": 5, "digits": 60, "imdb": 1, "pathfinder": 1, "pathfinder-9": 3, "pathfinder-mini": 3}
"""Of the recipe without options, by data; 10 for others."""
TEXT_HOST = "sequence_encoder(grams=5, merge=4)"
"""The host of texts at the desk scale; the published one is "sequence_encoder(pool='padded_mean')"."""


@dataclass(frozen=True, kw_only=True)
class Sequences(ValidationPart):
    """Top-1 accuracy of a host on sequences of symbols, or on pairs of them.

    host: a model of token ids with the options num_classes, length, vocabulary, pairs and mask; "sequence_encoder" is
    Regard's. data: "listops", "listops-mini", "pathfinder", "pathfinder-9", "pathfinder-mini", "imdb", images as
    sequences of grey values ("cifar10", "digits", ...), or the user's tables with columns text and label, or text1,
    text2 and label. length: symbols of a padded sequence, 0 = the default of the data; longer texts are cut, images are
    resized (1,024 pixels and 4,000 bytes in the paper). mask: mechanisms that can apply a padding mask get one; for
    the others, padding is part of the input. split: "test", or "held" for the validation part. limit: number of
    training and test samples, 0 = all: the first ones. tested: number of test samples, 0 = all. val, val_seed: the
    validation part, see `regard.lab.tasks.validation.ValidationPart`.
    Raises: ConfigError.
    """

    name: ClassVar[str] = "sequences"
    metric: ClassVar[str] = "top1"
    further: ClassVar[tuple[str, ...]] = ("loss",)
    example_data: ClassVar[str] = "listops-mini"
    sets: ClassVar[Mapping[str, str]] = data_sets.NAMED
    unit: ClassVar[str] = "sequences"
    takes_text: ClassVar[bool] = True
    model_fields: ClassVar[tuple[str, ...]] = ("length",)

    length: int = 0
    mask: bool = True
    split: Literal["test", "held"] = "test"
    limit: int = 0
    tested: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.length, self.limit, self.tested) < 0:
            raise ConfigError(
                f"length, limit and tested are 0 or more, not {self.length}, {self.limit} and {self.tested}"
            )
        self._check_length()

    def _check_length(self) -> None:
        """Raises: ConfigError for a number of pixels that the data cannot have."""
        whole = data_sets.default_length(self.data)
        if self.data in pathfinder.PATHFINDER and self.tokens != whole:
            raise ConfigError(f"length is {whole}, the pixels of {self.data}, not {self.length}")
        if self.data in pixels.NAMED:
            pixels.side(self.tokens)

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        """Recipes of the desk scale: minutes on one core of a CPU, hours for "listops" and "pathfinder" themselves.

        Texts get `TEXT_HOST`: from single bytes, thousands of steps give no more than a bag of bytes does.
        """
        recipe: dict[str, Any] = {"augment": "none", "smoothing": 0.0, "batch": 64, "lr": 2e-3}
        recipe["epochs"] = EPOCHS.get(data, 10)
        task: dict[str, Any] = {"host": "sequence_encoder"}
        if data_sets.known_facts(data).alphabet == "bytes":
            task["host"], recipe["batch"] = TEXT_HOST, 32
        if data == "imdb":
            task["tested"] = 2000
        return {"task": task, "recipe": recipe}

    @property
    def tokens(self) -> int:
        """Symbols of a padded sequence."""
        return self.length or data_sets.default_length(self.data)

    def identity(self) -> "Self":
        return dataclasses.replace(self, data=data_sets.identity(self.data), length=self.tokens, extra=())

    def check(self, recipe: Training) -> None:
        self.check_recipe(recipe, ("none",), without=("mixup", "cutmix", "erasing"))

    # data

    def data_set(self) -> SequenceSet:
        """The data set. Raises: DataError."""
        return data_sets.load(self.data, self.tokens)

    def train_split(self) -> Split:
        """The training samples, at most `limit`, without the validation part."""
        sequences = self.data_set()
        samples = _first(sequences.train, self.limit)
        return samples.take(self.divide(len(samples))[0]) if self.val and sequences.held is None else samples

    def test_split(self) -> Split:
        """The samples that are evaluated, at most `limit` and `tested`. Raises: DataError without a "held" split."""
        return self._test_split(self.data_set(), self.split)

    def _test_split(self, sequences: SequenceSet, split: str) -> Split:
        samples = sequences.test if split == "test" else sequences.held
        if samples is None and self.val:
            first = _first(sequences.train, self.limit)
            samples = first.take(self.divide(len(first))[1])
        if samples is None:
            raise DataError(f'{sequences.name} has no samples reserved for tuning; use split="test", or set val')
        return _first(samples, min(filter(None, (self.limit, self.tested)), default=0))

    def record(self) -> dict[str, Any]:
        """As in `Task`, and: class_names and `classes`, a digest of them; alphabet, vocabulary, padded and pairs, as in
        `Facts`; length; truncated, numbers of sequences with more symbols than that."""
        sequences, facts = self.data_set(), data_sets.facts_of(self.data_set())
        train, test = self.train_split(), self.test_split()
        return {
            "name": sequences.name,
            "checksum": sequences.checksum,
            "train": len(train),
            "test": len(test),
            "class_names": list(sequences.classes),
            "classes": names_digest(sequences.classes),
            **{name: getattr(facts, name) for name in RECORDED},
            "length": self.tokens,
            "truncated": {"train": train.count_truncated(self.tokens), "test": test.count_truncated(self.tokens)},
        }

    def sample_counts(self) -> tuple[int, int]:
        counts = data_sets.known_counts(self.data)
        if counts is None or self.split != "test" or self.val:
            return super().sample_counts()
        limit = self.limit or max(counts)
        return min(counts[0], limit), min(counts[1], limit, self.tested or counts[1])

    @property
    def chance(self) -> float:
        return majority(self.test_split().labels)

    # the model

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> nn.Module:
        return self.build(mixer, *self._facts(record), removed)

    def _facts(self, record: Record | None) -> tuple[data_sets.Facts, int]:
        """The facts and the length that a record holds; those of the data without one."""
        if record is None:
            return data_sets.facts_of(self.data_set()), self.tokens
        return data_sets.Facts(len(record["class_names"]), *(record[name] for name in RECORDED)), record["length"]

    def build(self, mixer: MixerConfig | None, facts: data_sets.Facts, length: int, removed: bool = False) -> nn.Module:
        """The host with the mechanism for such data; needs none. Raises: ConfigError."""
        spelled = parse_host(self.host)[1]
        for name in LEFT_TO_DATA:
            if name in spelled:
                hint = f"set task.{name}" if name in ("length", "mask") else "the data tell it"
                raise ConfigError(f"leave {name} out of the host {self.host}: {hint}")
        mask = self.mask and facts.padded
        if mask and mixer is not None and "padding" not in mixer.masks:
            log.info("%s cannot apply a padding mask: padding is part of its input", spell(mixer))
        model = create_model(
            self.host, mixer, extra=self.extra, num_classes=facts.classes, length=length,
            vocabulary=facts.vocabulary, pairs=facts.pairs, mask=mask,
        )  # fmt: skip
        return remove(model, ports=user_ports(self.extra)) if removed else model

    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        facts = data_sets.known_facts(self.data)
        facts = dataclasses.replace(facts, classes=outputs or facts.classes)
        model, rng = self.build(mixer, facts, self.tokens, removed), np.random.default_rng(0)

        def ids(n: int) -> Tensor:
            shape = (n, 2, self.tokens) if facts.pairs else (n, self.tokens)
            return torch.from_numpy(rng.integers(1, facts.vocabulary, shape))

        def loss(n: int) -> Tensor:
            return F.cross_entropy(model(ids(n)).float(), torch.from_numpy(rng.integers(0, facts.classes, n)))

        return Trial(model, (ids(1),), loss, lambda n: model(ids(n)))

    def example(self) -> tuple[Tensor]:
        return (tensors(self.test_split(), np.arange(1), self.tokens)[0],)

    # training and evaluation

    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> TokenBatches:
        samples = self.train_split()
        check_parts(len(samples), recipe.batch, part)
        return TokenBatches(samples, self.tokens, recipe.batch, seed, part)

    def loss(
        self, model: nn.Module, batch: Samples, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """Cross-entropy."""
        scores = model(batch[0].to(device)).float()
        return F.cross_entropy(scores, batch[1].to(device), label_smoothing=recipe.smoothing)

    def score(self, model: nn.Module, device: torch.device) -> Score:
        """Top-1 accuracy and mean cross-entropy; for texts, `details` has the accuracy of `bag_of_symbols`."""
        score = top1_score(_scores(model, device, self.test_split(), self.tokens))
        if self.data_set().alphabet == "bytes":
            score.details["bag_of_bytes"] = _bag(self, self.data_set().name)
        return score

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """Score on the test samples of other data with the same symbols and classes; on all of a table without a test.

        Raises: DataError.
        """
        facts, length = self._facts(record)
        other = data_sets.load(data, length)
        if (other.alphabet, other.pairs) != (facts.alphabet, facts.pairs):
            kinds = [f"{'pairs of ' * pairs}{kind}" for kind, pairs in (
                (facts.alphabet, facts.pairs), (other.alphabet, other.pairs))]  # fmt: skip
            raise DataError(f"the run takes {kinds[0]}, {data} has {kinds[1]}")
        check_classes(data, other.classes, record["class_names"])
        parts = [self._test_split(other, "test")]
        if other.divided and same_data(self.data, data):
            check_kept_test(data, other.name, record)
        elif other.divided and other.name != record.get("name"):
            parts = [other.train, other.test]
        return top1_score(scores for part in parts for scores in _scores(model, device, part, length))

    def predict(
        self, model: nn.Module, sources: Sequence[str | Path], device: torch.device, record: Record
    ) -> list[Prediction]:
        """For an image {"file", **p}, for a file of texts {"file", "lines", "predictions": [{"text", **p}, ...]}, and
        for a text {"text", **p}; p are the five most probable classes: "label", "probability" and "top".

        A file has a text in each line, a pair is two texts with a tab between them. p has "truncated": True for a text
        of which only the beginning was read.
        """
        facts, length = self._facts(record)
        model.eval()

        def answer(parts: list[np.ndarray]) -> dict[str, Any]:
            split = Split(Tokens.of(parts), np.zeros(1, np.int64), facts.pairs)
            ids, _ = tensors(split, np.arange(1), length)
            with torch.inference_mode():
                scores = model(ids.to(device))[0].float()
            return best_classes(scores, record["class_names"]) | (
                {"truncated": True} if split.count_truncated(length) else {}
            )

        predictions: list[dict[str, Any]] = []
        for source in sources:
            if facts.alphabet == "pixels":
                predictions.append({"file": str(source), **answer([pixels.encode(source, length)])})
                continue
            path = file_of(source)
            lines = read_lines(path) if path else [str(source)]
            where = str(path) if path else "the text"
            parts = [
                inputs.encode(line, facts, f"{where}, line {row}" if path else where)
                for row, line in enumerate(lines, 1)
            ]
            answers = [{"text": line, **answer(part)} for line, part in zip(lines, parts, strict=True)]
            predictions += [{"file": str(path), "lines": len(lines), "predictions": answers}] if path else answers
        return predictions


def _first(split: Split, limit: int) -> Split:
    return split if not limit or limit >= len(split) else split.take(np.arange(limit))


@lru_cache(maxsize=4)
def _bag(task: Sequences, name: str) -> float:
    """Of the data with this name, a digest of the user's own."""
    vocabulary = data_sets.facts_of(task.data_set()).vocabulary
    value = bag_of_symbols(task.train_split(), task.test_split(), task.tokens, vocabulary)
    log.info("%s, first %d symbols: a logistic regression on their counts has %.2f %%", task.data, task.tokens, value)
    return value


def _scores(model: nn.Module, device: torch.device, split: Split, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    model.eval()
    for ids, labels in evaluation_batches(split, length):
        with torch.inference_mode():
            scores = model(ids.to(device)).float()
        yield scores, labels.to(device)
