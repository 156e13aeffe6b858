"""Recordings as inputs for models of transformers: features, their frames that are data, and a decoder's tokens."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.inputs.previews import Words
from normscope.models.inputs.audio import SUFFIXES, AudioFormat, read, utterances
from normscope.models.inputs.numbered_inputs import FileKind, Prepared, files_or, text_beside
from normscope.models.inputs.processors import arguments
from normscope.models.inputs.text import check_tokens, words_of


@dataclass(frozen=True)
class Hearing:
    """Preparation of recordings for a network of transformers; ``tokenizer`` is None where it has no decoder."""

    extractor: Any
    tokenizer: Any
    module: Any
    config: Any

    @property
    def taken(self) -> AudioFormat:
        """Return the rate of the recordings, and the fewest samples that make one frame."""
        if self.module.main_input_name != "input_values" or not hasattr(
            self.module, "_get_feat_extract_output_lengths"
        ):
            return AudioFormat(self.extractor.sampling_rate, shortest=1)
        low, high = 0, self.extractor.sampling_rate  # too few, and enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._frames_of(middle) > 0 else (middle, high)
        return AudioFormat(self.extractor.sampling_rate, shortest=high)

    @property
    def longest(self) -> str:
        """Describe the part of a long recording that reaches the network; empty for all of it."""
        if self._of_patches:
            return count(self.extractor.max_length, "frame")
        samples = getattr(self.extractor, "n_samples", None)
        return f"{samples / self.extractor.sampling_rate:g} s" if samples else ""

    @property
    def words(self) -> Words | None:
        """From the decoder's token ids to what they stand for; None where there is no decoder."""
        return None if self.tokenizer is None else partial(words_of, self.tokenizer)

    def prepared(self, waveform: Tensor, transcript: str | None) -> Prepared:
        """Make one recording ready.

        Args:
            waveform: float32 ``(samples,)``.
            transcript: that a decoder reads; None for the tokens that every transcript begins with, alone.

        Raises:
            DataError: if the transcript is longer than the decoder takes, or holds a token that it does not know.
        """
        made = self._made(self.extractor, waveform)
        kwargs = arguments({name: value for name, value in made.items() if name != "attention_mask"}, self.module)
        mask = made.get("attention_mask")
        cut = len(waveform) > getattr(self.extractor, "n_samples", len(waveform))
        valid = None
        if self._of_patches:
            valid, cut = self._patches(waveform)
        elif mask is not None and not bool(mask.all()):
            valid = self._subsampled(mask)
            if self.tokenizer is None and "attention_mask" in inspect.signature(self.module.forward).parameters:
                kwargs["attention_mask"] = mask
        if self.tokenizer is None:
            return Prepared(Batch(kwargs=kwargs, valid=valid), cut)
        written = {"decoder_input_ids": self._written(transcript), "use_cache": False}
        within = {} if valid is None else {self._encoder: valid}
        return Prepared(Batch(kwargs=kwargs | written, valid_within=within), cut)

    def _made(self, extractor: Any, waveform: Tensor) -> Any:
        return extractor(
            waveform.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt", return_attention_mask=True
        )

    def _frames_of(self, length: int) -> int:
        return int(self.module._get_feat_extract_output_lengths(torch.tensor(length)))

    def _subsampled(self, mask: Tensor) -> Tensor:
        """Return which of the network's frames are data: it has fewer than the extractor, by its own function."""
        if not hasattr(self.module, "_get_feat_extract_output_lengths"):
            return mask.bool()
        frames = self._frames_of(mask.shape[1])
        return torch.arange(frames)[None] < self._frames_of(int(mask.sum()))

    @property
    def _encoder(self) -> str:
        encoder, named = self.module.get_encoder(), self.module.named_modules()
        names: list[str] = [name for name, part in named if part is encoder]
        return names[0]

    @property
    def _of_patches(self) -> bool:
        """True if it reads patches of a spectrogram of fixed length, as AST does, whose extractor returns no mask."""
        return hasattr(self.config, "time_stride") and hasattr(self.extractor, "max_length")

    def _patches(self, waveform: Tensor) -> tuple[Tensor, bool]:
        """Mark the tokens that see part of the recording, bool ``(1, tokens)``, and report truncation."""
        longer = copy.copy(self.extractor)
        longer.max_length += 1
        rows = self._made(longer, waveform)["input_values"][0]
        nothing = torch.zeros(1, dtype=rows.dtype)
        padding = longer.normalize(nothing.numpy()).item() if longer.do_normalize else 0.0
        heard = int((rows != padding).any(1).nonzero().max()) + 1
        network = getattr(self.module, self.module.base_model_prefix, self.module)
        across, along = network.embeddings.get_shape(self.config)  # mel bins, time
        seen = torch.arange(along) * self.config.time_stride < heard
        special = network.embeddings.position_embeddings.shape[1] - across * along
        valid = torch.cat([torch.ones(special, dtype=torch.bool), seen.repeat(across)])
        return valid[None], heard > self.extractor.max_length

    def _written(self, transcript: str | None) -> Tensor:
        """Return what the decoder reads, int64 ``(1, tokens)``: its start, then the transcript without its end."""
        start = self.config.decoder_start_token_id
        tokens = self.tokenizer(transcript or "", verbose=False)["input_ids"]
        tokens = [start, *(tokens[1:] if tokens[:1] == [start] else tokens)]
        if len(tokens) > 1 and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()
        longest = getattr(self.config, "max_target_positions", len(tokens))
        if len(tokens) > longest:
            raise DataError(f"its transcript has {len(tokens):,} tokens, and the model writes {longest:,} at most")
        check_tokens(tokens, self.config.vocab_size, "its transcript")
        return torch.tensor([tokens])


def heard_inputs(extractor: Any, tokenizer: Any, module: nn.Module, config: Any, options: LoadOptions) -> Inputs:
    """Return the recordings at ``options.data``, or the synthetic utterances, as a feature extractor makes them.

    One recording a batch, whatever ``batch_size`` says: what pads the shorter ones of a batch would enter the
    statistics of every norm that looks along time, and the layers before the frames have lengths of their own. A
    decoder reads what stands in the text file of the same name.

    Raises:
        DataError: if there is no recording to be found.
    """
    hearing = Hearing(extractor, tokenizer, module, config)
    taken = hearing.taken
    writes = tokenizer is not None

    def synthetic() -> tuple[list[Prepared], list[Sample], str]:
        samples, waveforms, transcripts, total = utterances(taken)
        heard = [hearing.prepared(*pair) for pair in zip(waveforms, transcripts, strict=True)]
        return heard, samples, total + (", each with what it says" if writes else "")

    kind = FileKind(
        "recording",
        SUFFIXES,
        lambda path: hearing.prepared(read(path, taken), text_beside(path) if writes else None),
        cut_to=hearing.longest,
        beside=".txt" if writes else "",
        remarks=("the decoder reads NAME.txt, or without one the start alone",) if writes else (),
    )
    return files_or(synthetic, kind, options, one_by_one=True, words=hearing.words)
