"""Translation of sentences, with an encoder and a decoder around any mechanism that can."""

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import ConfigError, MixerConfig, UnsupportedError, nearest
from regard.images.order import Part
from regard.models.create import parse_host

from ..base import Prediction, Record, Score, Training, Trial
from ..jackknife import jackknife_values
from ..text_inputs import file_of, read_lines
from ..validation import ValidationPart
from . import texts
from .alignment import alignments, picture
from .batches import Batch, Batches, Encoded, check_length, encode, evaluation_batches, pad, tensors
from .bleu import bleu, chrf, signature, statistics
from .loss import cross_entropy
from .networks.translator import END, PAD, SPECIAL, START, translator
from .texts import Corpus, Sentences
from .vocabulary import Vocabulary, train_vocabulary

if TYPE_CHECKING:
    from PIL.Image import Image

HOST = "translator"
DRAWN = 100
"""Up to this number of sentences, predictions have alignments, which take much room."""


@dataclass(frozen=True, kw_only=True)
class Translation(ValidationPart):
    """BLEU of translations by beam search.

    host: "translator" with options, see `regard.lab.tasks.translation.networks.translator`; or a function in `extra`
    with the same arguments. data: "numbers", "multi30k", or a folder with train.SOURCE and train.TARGET, and val or
    test likewise (.gz is allowed). source, target: the languages, which are the suffixes of the files. vocabulary:
    largest number of tokens of the shared byte-pair encoding, which is trained on the training texts. longest: largest
    number of tokens in a sentence. place: the attention that the mechanism replaces: "self" (encoder and decoder),
    "encoder" (its self-attention alone) or "cross" (from the decoder to the encoder). split: that is evaluated,
    "test", "val", or "held" for the validation part. beam, penalty: of the search. limit: number of training and of
    test sentences, the first ones; 0 = all. val, val_seed: the validation part, see
    `regard.lab.tasks.validation.ValidationPart`; a split "val" beside "test" is reserved for it.
    Raises: ConfigError.
    """

    name: ClassVar[str] = "translation"
    metric: ClassVar[str] = "bleu"
    further: ClassVar[tuple[str, ...]] = ("chrf", "loss")
    example_data: ClassVar[str] = "numbers"
    trivial: ClassVar[str] = "copying the source"
    unit: ClassVar[str] = "sentences"
    takes_text: ClassVar[bool] = True
    sets: ClassVar[Mapping[str, str]] = texts.NAMED
    no_export: ClassVar[str] = "a translation is a search, whose number of steps depends on the sentence"

    source: str = "en"
    target: str = "de"
    vocabulary: int = 8000
    longest: int = 256
    place: Literal["self", "encoder", "cross"] = "self"
    split: Literal["test", "val", "held"] = "test"
    beam: int = 4
    penalty: float = 0.6
    limit: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        texts.check_languages(self.source, self.target)
        if self.vocabulary < 1:
            raise ConfigError(f"vocabulary is a number of tokens, at least 1, not {self.vocabulary}")
        if self.longest < 2 or self.beam < 1 or self.penalty < 0 or self.limit < 0:
            raise ConfigError(
                "longest is at least 2, beam at least 1, penalty and limit at least 0, not "
                f"longest={self.longest}, beam={self.beam}, penalty={self.penalty}, limit={self.limit}"
            )

    @classmethod
    def defaults(cls, data: str) -> dict[str, dict[str, Any]]:
        """Adam with the inverse square root schedule; epochs and vocabulary follow from the number of sentences."""
        recipe: dict[str, Any] = {
            "augment": "none", "optimizer": "adam", "weight_decay": 0.0, "schedule": "rsqrt", "lr": 2e-3,
        }  # fmt: skip
        if data == "numbers":
            host = f"{HOST}(dim=96, depth=2, hidden=192)"
            recipe |= {"batch": 64, "epochs": 7, "warmup": 0.2, "average": 2}
            return {"task": {"host": host, "vocabulary": 500}, "recipe": recipe}
        sentences = texts.training_sentences(data) or texts.COUNTS["multi30k"][0]
        epochs = min(max(round(6 * 29_000 / sentences), 6), 60)
        recipe |= {"batch": 96, "epochs": epochs, "warmup": 0.2, "average": max(epochs // 4, 2)}
        size = 1000 if sentences < 5000 else 4000 if sentences < 100_000 else 8000
        return {"task": {"host": f"{HOST}(drop=0.2)", "vocabulary": size}, "recipe": recipe}

    def check(self, recipe: Training) -> None:
        self.check_recipe(recipe, ("none",), without=("mixup", "cutmix", "erasing"))

    def identity(self) -> "Translation":
        return dataclasses.replace(self, data=texts.identity(self.data, self.source, self.target), extra=())

    def corpus(self) -> Corpus:
        """The texts. Raises: DataError."""
        return texts.load(self.data, self.source, self.target)

    def train_sentences(self) -> Sentences:
        """The training sentences, at most `limit`, without the validation part."""
        sentences = self.corpus().split("train").first(self.limit)
        return sentences.take(self.divide(len(sentences))[0]) if self._draws else sentences

    def test_sentences(self) -> Sentences:
        """The sentences of the split that is evaluated, at most `limit`. Raises: DataError without this split."""
        if self.split != "held":
            return self.corpus().split(self.split).first(self.limit)
        if self._draws:
            sentences = self.corpus().split("train").first(self.limit)
            return sentences.take(self.divide(len(sentences))[1])
        return self.corpus().split("val" if "val" in self.corpus().splits else "held").first(self.limit)

    @property
    def _draws(self) -> bool:
        """Whether the validation part is drawn from the training sentences."""
        return bool(self.val) and "val" not in self.corpus().splits

    def words(self, record: Record | None = None) -> Vocabulary:
        """The vocabulary. record: None = trained on the training texts."""
        if record is not None:
            return _read_vocabulary(record["merges"])
        sentences = self.train_sentences()
        return train_vocabulary((sentences.source, sentences.target), self.vocabulary)

    def network(self, mixer: MixerConfig | None, removed: bool = False, record: Record | None = None) -> nn.Module:
        return self.build(mixer, len(self.words(record)), removed)

    def build(self, mixer: MixerConfig | None, tokens: int, removed: bool = False) -> nn.Module:
        """The host with the mechanism for a vocabulary of so many tokens; needs no data. Raises: ConfigError."""
        name, options = parse_host(self.host)
        hosts = {HOST: translator} | {item.__name__: item for item in self.extra}
        if name not in hosts:
            raise ConfigError(f"--task translation has no host {name!r}; {nearest(name, hosts)}")
        accepted = inspect.signature(hosts[name]).parameters
        for option in options:
            if option not in accepted or option == "vocabulary":
                raise ConfigError(f"{name} has no option {option!r}; {nearest(option, [*accepted][1:])}")
        options |= self._attentions(mixer, removed, options)
        try:
            return hosts[name](vocabulary=tokens, **options)
        except TypeError as error:
            raise ConfigError(f"{self.host} has an option of the wrong type: {error}") from error

    def _attentions(self, mixer: MixerConfig | None, removed: bool, options: Mapping[str, Any]) -> dict[str, Any]:
        """The host's options for the mechanism. Raises: ConfigError."""
        if mixer is None and not removed:
            return {}
        names = {"self": ("attention", "decoder"), "encoder": ("attention",), "cross": ("cross",)}[self.place]
        given = [name for name in names if name in options]
        if given:
            raise ConfigError(f"{given[0]} of the host is what the mechanism replaces; leave it out of {self.host}")
        if removed and self.place == "cross":
            raise ConfigError(
                'without cross-attention a translation does not know its source; compare with Factors("0000"), '
                "its uniform average"
            )
        if self.place != "encoder":
            return {names[0]: mixer}
        return {"attention": mixer, "decoder": options.get("decoder", "Softmax()")}

    def trial(self, mixer: MixerConfig | None, removed: bool = False, outputs: int = 0, augment: str = "") -> Trial:
        """As in `Task`, with sentences of 16 tokens. outputs: size of the vocabulary."""
        tokens = outputs or self.vocabulary
        model = self.build(mixer, tokens, removed)

        def sentences(n: int) -> Tensor:
            return torch.randint(SPECIAL, tokens, (n, 16))

        def loss(n: int) -> Tensor:
            scores = model(sentences(n), sentences(n))
            return cross_entropy(scores, sentences(n)) / scores[..., 0].numel()

        search = (None, self.beam, self.penalty)
        return Trial(model, (sentences(1), sentences(1)), loss, lambda n: model(sentences(n), *search))

    def feed(self, recipe: Training, seed: int, part: Part = (0, 1)) -> Batches:
        """As in `Task`. recipe.batch: as `sentences` of `Batches`."""
        return Batches(encode(self.train_sentences(), self.words(), self.longest), recipe.batch, seed, part)

    def loss(
        self, model: nn.Module, batch: Batch, recipe: Training, device: torch.device, teacher: nn.Module | None = None
    ) -> Tensor:
        """Cross-entropy of the next token, with label smoothing: the mean over the tokens of the batch."""
        source, target, labels = (item.to(device) for item in batch[:3])
        return cross_entropy(model(source, target), labels, recipe.smoothing) / batch[3]

    def _mean_loss(self, model: nn.Module, device: torch.device, pairs: Encoded) -> float:
        """The mean loss of a token of the references."""
        model.eval()
        total, tokens = 0.0, 0
        for _, *batch in evaluation_batches(pairs):
            source, target, labels = (item.to(device) for item in batch)
            with torch.inference_mode():
                total += cross_entropy(model(source, target), labels).item()
            tokens += int((labels != PAD).sum())
        return total / tokens

    def score(self, model: nn.Module, device: torch.device) -> Score:
        return self._score(model, device, self.test_sentences())

    def score_on(self, data: str, model: nn.Module, device: torch.device, record: Record) -> Score:
        """Score on the test split of other texts in the same languages, with the vocabulary of the run."""
        return self._score(model, device, self.on(data).test_sentences(), record)

    def _score(
        self, model: nn.Module, device: torch.device, sentences: Sentences, record: Record | None = None
    ) -> Score:
        """samples: what each sentence contributes to the BLEU of the set (`jackknife_values`)."""
        words = self.words(record)
        pairs = encode(sentences, words, self.longest)
        loss = self._mean_loss(model, device, pairs)
        outputs = words.decode(self._translate(model, device, pairs.source))
        counts = statistics(outputs, sentences.target, self.target)
        total = counts.sum(0)
        metrics = {"bleu": bleu(total), "chrf": chrf(outputs, sentences.target), "loss": loss}
        details = {"words/reference words": float(total[0] / total[1])}
        return Score(metrics, jackknife_values(counts, bleu), details)

    @property
    def chance(self) -> float:
        sentences = self.test_sentences()
        return bleu(statistics(sentences.source, sentences.target, self.target).sum(0))

    def example(self) -> tuple[Tensor, Tensor]:
        source, target, _ = tensors(encode(self.test_sentences(), self.words(), self.longest), np.arange(1))
        return source, target

    def record(self) -> dict[str, Any]:
        """As in `Task`, and: merges, the vocabulary as text; signature, of sacreBLEU."""
        words, corpus = self.words(), self.corpus()
        return {
            "name": corpus.name,
            "checksum": hashlib.sha256((corpus.checksum + words.digest).encode()).hexdigest(),
            "train": len(self.train_sentences()),
            "test": len(self.test_sentences()),
            "signature": signature(self.target),
            "merges": words.text,
        }

    def sample_counts(self) -> tuple[int, int]:
        if self.data not in texts.COUNTS or self.split != "test" or self.val:
            return super().sample_counts()
        train, test = texts.COUNTS[self.data]
        limit = self.limit or max(train, test)
        return min(train, limit), min(test, limit)

    def predict(
        self, model: nn.Module, sources: Sequence[str | Path], device: torch.device, record: Record
    ) -> list[Prediction]:
        """For each sentence, and each line of a file: {"text", "translation"}, and "file" and "line".

        Up to `DRAWN` sentences also have an "alignment": the pieces of both texts, and the weights between them, where
        the cross-attention has such weights.
        """
        sentences: list[tuple[str, str, dict[str, Any]]] = []
        for source in sources:
            if (path := file_of(source)) is None:
                sentences.append((str(source), "the text", {}))
                continue
            for row, line in enumerate(read_lines(path), 1):
                sentences.append((line, f"{path}, line {row}", {"file": str(path), "line": row}))
        words = self.words(record)
        tokens = words.encode([line for line, _, _ in sentences])
        for item, (_, where, _) in zip(tokens, sentences, strict=True):
            check_length(item, self.longest, where)
        written = self._translate(model, device, tokens)
        outputs = zip(sentences, words.decode(written), strict=True)
        predictions = [{"text": line, "translation": output, **place} for (line, _, place), output in outputs]
        if len(predictions) <= DRAWN:
            with suppress(UnsupportedError):
                for prediction, item, output in zip(predictions, tokens, written, strict=True):
                    prediction["alignment"] = _alignment(model, device, words, item, [*output, END])
        return predictions

    def _translate(self, model: nn.Module, device: torch.device, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """The translations of some sentences as tokens, without `END`."""
        model.eval()
        outputs: list[list[int]] = [[] for _ in sources]
        for rows, source, _, _ in evaluation_batches(Encoded(sources, sources)):
            with torch.inference_mode():
                written = model(source.to(device), None, self.beam, self.penalty).tolist()
            for row, item in zip(rows, written, strict=True):
                outputs[row] = item[: item.index(END)] if END in item else item
        return outputs

    def draw(self, source: str | Path, prediction: Mapping[str, Any]) -> "Image":
        """The alignment: a row for each piece of the translation, a column for each piece of the source."""
        if "alignment" not in prediction:
            raise UnsupportedError(
                f"alignments are drawn for at most {DRAWN} sentences at a time, and for a cross-attention with weights"
            )
        return picture(*(prediction["alignment"][name] for name in ("source", "target", "weights")))


def _alignment(
    model: nn.Module, device: torch.device, words: Vocabulary, source: list[int], output: list[int]
) -> dict[str, Any]:
    """Pieces of both texts, and the weights of the last layer's cross-attention; output ends with `END`."""
    target = pad([[START, *output[:-1]]]).to(device)
    weights = alignments(model, pad([source]).to(device), target)[0].cpu().numpy()
    return {"source": words.pieces(source), "target": words.pieces(output), "weights": weights.round(3).tolist()}


_read_vocabulary = lru_cache(maxsize=4)(Vocabulary.from_text)
