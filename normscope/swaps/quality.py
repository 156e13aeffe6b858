"""Quality of a network by labels, the text itself, human scores, or the noise that was added."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normscope.errors import DataError, MemoryEndedError, UsageError, count
from normscope.inputs.batch import Batch, Halving, Sample, as_batches, taken_once
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task, inferred_task
from normscope.pairs.ranks import Ranks
from normscope.runtime.network import SavedBuffers, restoring, run
from normscope.runtime.progress import Progress
from normscope.swaps.distances import in_float64
from normscope.swaps.reports import Quality, Score

MASKED_TOKENS = 256  # of a masked language model, each of which takes a pass over its text
_AT_ONCE = 1 << 24  # logits in float64 at a time
_ROUNDING = 1e-3  # relative L2 by which a causal model's logits may move: kernels sum in different orders
_POOLED = {"mean": "mean of the tokens", "first": "the first token", "last": "the last token"}

QualityFunction = Callable[[nn.Module], float]
Measured = tuple[Quality, Score]  # a quality without scores, and the score of one network


class UnmeasuredError(DataError):
    """The inputs contain nothing to score against."""


@dataclass
class Passes:
    """Forward passes of one network, each from its original buffers; in halves where memory ends."""

    model: nn.Module
    batches: Iterable[Any]
    outputs: Outputs
    buffers: SavedBuffers
    progress: Callable[[int, int | None], object]

    def output(self, batch: Batch) -> Tensor:
        """Return the network's output for a batch."""
        self.buffers.restore()
        return self.outputs.read(run(self.model, batch), batch)

    def answers(self, batches: Iterable[Any] | None = None, of: int | None = None) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches, or pieces that fit into memory, and their outputs; ``of`` is the number of samples."""
        batches = self.batches if batches is None else batches
        of, n_run, halving = of or getattr(batches, "n_samples", None), 0, Halving("judged")
        for batch in as_batches(batches):
            for piece, _ in halving.pieces(batch, None):
                try:
                    output = self.output(piece)
                except MemoryEndedError:
                    if len(piece.samples) == 1 or not piece.divisible:
                        raise
                    halving.halve(piece)
                else:
                    yield piece, output
                    n_run += len(piece.samples)
                    self.progress(n_run, of)


def _top1(passes: Passes, task: Task) -> Measured:
    """Share of samples whose largest logit is that of their class; non-finite logits are wrong."""

    def right(batch: Batch, logits: Tensor) -> list[bool]:
        labels = torch.tensor(_labels(batch, int))
        finite = logits.isfinite().all(-1).cpu()
        return ((logits.argmax(-1).cpu() == labels) & finite).tolist()

    return _accuracy("top-1 accuracy", "labelled sample", passes, right)


def _words(passes: Passes, task: Task) -> Measured:
    """Share of words that the likeliest letters of the frames spell, without repeats and blanks."""

    def right(batch: Batch, logits: Tensor) -> list[bool]:
        finite = logits.isfinite().flatten(1).all(1).tolist()
        spelled = [
            "".join(task.letters[letter] for letter in frames.unique_consecutive().tolist() if letter)
            for frames in logits.argmax(-1)
        ]
        return [
            whole and word == label for whole, word, label in zip(finite, spelled, _labels(batch, str), strict=True)
        ]

    return _accuracy("word accuracy", "word", passes, right)


def _labels(batch: Batch, kind: type) -> list[Any]:
    labels = [sample.label for sample in batch.samples]
    if not all(isinstance(label, kind) for label in labels):
        raise UnmeasuredError("the samples have no labels")
    return labels


def _accuracy(name: str, noun: str, passes: Passes, right_of: Callable[[Batch, Tensor], list[bool]]) -> Measured:
    right: list[bool] = []
    samples: list[Sample] = []
    for batch, logits in passes.answers():
        right += right_of(batch, logits)
        samples += batch.samples
    if not right:
        raise UnmeasuredError("there is no sample to judge by")
    interval = None
    if len({(sample.data, sample.source) for sample in samples}) == len(samples):  # else they are not independent
        from scipy import stats  # takes a second to import

        wilson = stats.binomtest(sum(right), len(right)).proportion_ci(0.95, method="wilson")
        interval = (float(wilson.low), float(wilson.high))
    return Quality(name, True, len(right), count(len(right), noun), {}), Score(sum(right) / len(right), interval)


def _perplexity(passes: Passes, task: Task) -> Measured:
    """exp of the mean of −log p over all tokens but the first of each text."""
    surprises: list[float] = []
    n, causal = 0, False
    for batch, logits in passes.answers():
        ids, valid = _tokens(batch)
        _check_positions(logits, ids.shape)
        for row in range(len(ids)):
            tokens, kept = ids[row, valid[row]], valid[row].to(logits.device)
            if len(tokens) < 2:
                continue
            surprises.append(_surprise(logits[row][kept][:-1], tokens[1:]))
            causal = causal or _is_causal(passes, batch, row)
            n += len(tokens) - 1
    return _exp_of_mean("perplexity", surprises, n, f"{count(n, 'token')} of {count(len(surprises), 'text')}")


def _is_causal(passes: Passes, batch: Batch, row: int) -> bool:
    """True if logits stay when the last token of a text changes; False if they are not finite; else UnmeasuredError.

    Class names do not reveal models that look ahead, such as BertLMHeadModel, depending on its configuration.
    """
    text = batch.take([row])
    ids, valid = _tokens(text)
    last = int(valid[0].nonzero()[-1])
    before = passes.output(text)[0, :last].clone()
    different = [token for token in ids[0].tolist() if token != ids[0, last]]
    changed = ids.clone()
    changed[0, last] = different[0] if different else (int(ids[0, last]) + 1) % before.shape[-1]
    by_place: dict[str, Any] = {"args": (changed, *text.args[1:])}
    arguments = by_place if text.args else {"kwargs": {**text.kwargs, "input_ids": changed}}
    after = passes.output(replace(text, **arguments))[0, :last]
    if not bool(before.isfinite().all() & after.isfinite().all()):
        return False
    before, after = in_float64(before[valid[0, :last]]), in_float64(after[valid[0, :last]])
    if float((after - before).norm()) > _ROUNDING * float(before.norm()):
        raise UnmeasuredError("the network looks at the tokens that it would have to predict, as no causal model does")
    return True


def _pseudo_perplexity(passes: Passes, task: Task) -> Measured:
    """exp of the mean of −log p of tokens, each masked alone (Salazar et al., arXiv 1910.14659)."""
    total = sum(int(_words_of(batch, task).sum()) for batch in as_batches(passes.batches))
    taken = min(total, MASKED_TOKENS)
    chosen = {number * total // taken for number in range(taken)} if taken else set()
    surprises = []
    for batch, logits in passes.answers(_masked(passes.batches, task, chosen), taken):
        _check_positions(logits, _tokens(batch)[0].shape)
        for row, sample in enumerate(batch.samples):
            surprises.append(_surprise(logits[row, sample.index][None], torch.tensor([sample.label])))
    of = f"{count(taken, 'token')}, each masked alone" + (f", evenly among {total:,}" if taken < total else "")
    return _exp_of_mean("pseudo-perplexity", surprises, taken, of)


def _masked(batches: Iterable[Any], task: Task, chosen: set[int]) -> Iterator[Batch]:
    """Yield copies of texts with one masked token each, whose position is the sample's index, and itself the label."""
    number = 0
    for batch in as_batches(batches):
        ids, _ = _tokens(batch)
        at_once = max(len(batch.samples), getattr(batches, "batch_size", 1))
        for row, words in enumerate(_words_of(batch, task)):
            positions = words.nonzero().flatten().tolist()
            masked = [position for order, position in enumerate(positions, start=number) if order in chosen]
            number += len(positions)
            for first in range(0, len(masked), at_once):
                piece = masked[first : first + at_once]
                copies, rows = batch.take([row] * len(piece)), torch.arange(len(piece))
                hidden = copies.kwargs["input_ids"].clone()
                hidden[rows, piece] = task.mask_id
                samples = tuple(replace(batch.samples[row], index=at, label=int(ids[row, at])) for at in piece)
                yield replace(copies, kwargs={**copies.kwargs, "input_ids": hidden}, samples=samples)


def _words_of(batch: Batch, task: Task) -> Tensor:
    """Return a mask of the tokens that are neither padding nor the tokenizer's special tokens."""
    ids, valid = _tokens(batch)
    return valid & ~torch.isin(ids, torch.tensor(sorted(task.unmasked), device=ids.device))


def _tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return token ids and the mask of data among them, ``(samples, positions)``."""
    ids = batch.args[0] if batch.args else batch.kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise UnmeasuredError("the batches have no input_ids of samples and positions")
    return ids, torch.ones_like(ids, dtype=torch.bool) if batch.valid is None else batch.valid.to(ids.device)


def _check_positions(output: Tensor, shape: Sequence[int]) -> None:
    if output.ndim != 3 or tuple(output.shape[: len(shape)]) != tuple(shape):
        raise UnmeasuredError(f"the network gives {tuple(output.shape)}, which is not a vector for each of the tokens")


def _surprise(logits: Tensor, ids: Tensor) -> float:
    """Return the sum of −log p of tokens ``(positions,)`` under logits ``(positions, vocabulary)``, in float64."""
    step, parts = max(1, _AT_ONCE // logits.shape[-1]), []
    for first in range(0, len(ids), step):
        some = in_float64(logits[first : first + step])
        parts.append(float(F.cross_entropy(some, ids[first : first + step].to(some.device), reduction="sum")))
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.inf


def _exp_of_mean(name: str, surprises: Sequence[float], n: int, over: str) -> Measured:
    if not n:
        raise UnmeasuredError("no text has a token to predict")
    mean = math.inf if math.inf in surprises else math.fsum(surprises) / n
    perplexity = math.exp(mean) if mean < 700 else math.inf  # exp(709) is the largest
    return Quality(name, False, n, over, {}), Score(perplexity)


def _spearman(passes: Passes, task: Task) -> Measured:
    """Spearman's rank correlation of the cosines of pairs of sentences and human scores."""
    waiting: dict[int, Tensor] = {}  # embeddings of first sentences
    cosines, scores = [], []
    for batch, output in passes.answers():
        scored = _labels(batch, float)
        _check_positions(output, (len(batch.samples),) if batch.valid is None else batch.valid.shape)
        for sample, score, embedding in zip(batch.samples, scored, _pooled(output, batch, task), strict=True):
            first = waiting.pop(sample.source_index, None)
            if first is None:
                waiting[sample.source_index] = embedding
            else:
                cosines.append(float(F.cosine_similarity(first, embedding, dim=0)))
                scores.append(score)
    if len(set(scores)) < 2:
        raise UnmeasuredError(f"a rank correlation takes pairs of different scores, and there are {len(set(scores))}")
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)  # the correlation is NaN then
        correlation = float(stats.spearmanr(cosines, scores).statistic)
    over = f"{count(len(scores), 'pair')} of sentences, {_POOLED[task.pooling]}"
    return Quality("Spearman's rank correlation", True, len(scores), over, {}), Score(correlation)


def _pooled(output: Tensor, batch: Batch, task: Task) -> list[Tensor]:
    """Return the embedding of each text, float64 ``(features,)`` on the CPU; padding is in none."""
    embeddings = []
    for row, tokens in enumerate(output):
        kept = tokens if batch.valid is None else tokens[batch.valid[row].to(tokens.device)]
        kept = in_float64(kept).cpu()
        embeddings.append({"mean": kept.mean(0), "first": kept[0], "last": kept[-1]}[task.pooling])
    return embeddings


def _denoising(passes: Passes, task: Task) -> Measured:
    """Mean squared error of the prediction, as in training; infinite where anything is not finite."""
    errors: list[float] = []
    for batch, output in passes.answers():
        noise = None if task.truth is None else task.truth(batch.samples)
        if noise is None:
            raise UnmeasuredError("it is not known what noise was added to the samples")
        squares = (in_float64(output).cpu() - noise.double()).square()
        errors += squares.flatten(1).mean(1).nan_to_num(nan=math.inf).tolist()
    if not errors:
        raise UnmeasuredError("there is no sample to judge by")
    mean = math.inf if math.inf in errors else math.fsum(errors) / len(errors)
    return Quality("denoising error", False, len(errors), count(len(errors), "noised latent"), {}), Score(mean)


MEASURES: dict[str, Callable[[Passes, Task], Measured]] = {
    "top-1": _top1,
    "words": _words,
    "perplexity": _perplexity,
    "pseudo-perplexity": _pseudo_perplexity,
    "spearman": _spearman,
    "denoising": _denoising,
}


@dataclass
class QualityMeter:
    """Measure the quality of several networks on the same inputs.

    >>> import normscope
    >>> network = normscope.load("demo_vit", device="cpu")
    >>> meter = QualityMeter(network, None, network.inputs, network.outputs, lambda stage, done, of: None)
    >>> meter.add("original", network.module)
    >>> meter.quality.name, meter.quality.scores["original"].value
    ('top-1 accuracy', 1.0)
    """

    original: nn.Module | LoadedModel
    by: QualityFunction | Task | None  # a function, which ignores the batches, or a task; None for the loaded model's
    batches: Iterable[Any]  # held-out inputs
    outputs: Outputs
    progress: Progress  # called with the stage, the samples run and their number, if known
    quality: Quality | None = None  # the scores so far
    no_quality: str = ""  # reason why there are none

    def __post_init__(self) -> None:
        original = self.original
        self._by = self.by or (original.task if isinstance(original, LoadedModel) else inferred_task(original))
        if isinstance(self._by, Task):
            once = "the batches can be iterated only once" if taken_once(self.batches) else ""
            self.no_quality = (self._by.unmeasured if self._by.measure is None else "") or once

    def add(self, name: str, model: nn.Module) -> None:
        """Measure a network, and restore its state; UsageError if the user's function returns no number."""
        if self.no_quality:
            return
        with restoring(model) as buffers:
            if not isinstance(self._by, Task):
                name_of_function = getattr(self._by, "__name__", type(self._by).__name__).replace("<lambda>", "quality")
                quality, score = Quality(name_of_function, None, None, "", {}), Score(_number(self._by(model)))
            else:
                assert self._by.measure is not None  # noqa: S101  # there would be a reason
                progress = partial(self.progress, f"quality of the {name}")
                passes = Passes(model, self.batches, self.outputs, buffers, progress)
                try:
                    quality, score = MEASURES[self._by.measure](passes, self._by)
                except UnmeasuredError as error:
                    self.quality, self.no_quality = None, str(error)
                    return
        scores = {} if self.quality is None else self.quality.scores
        self.quality = replace(quality, scores={**scores, name: score})

    def share_with(self, ranks: Ranks) -> None:
        """Send the measurements of the first rank to all of them."""
        if ranks.size == 1:
            return
        import msgspec

        quality, self.no_quality = ranks.gather([self.quality and asdict(self.quality), self.no_quality])[0]
        self.quality = None if quality is None else msgspec.convert(quality, Quality)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"The function passed as quality= returned a {type(value).__name__}; it has to return a number."
        ) from None
