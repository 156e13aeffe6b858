"""Padding that lengths mark is in no sum: against the norms' inputs in passes of each sample alone."""

from inspect import Parameter, Signature
from types import SimpleNamespace

import pytest
import torch
from networks import inputs_of, network_of, numbered_samples, wrapped
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Batch

WIDTH = 8
torch.manual_seed(0)
X = torch.randn(4, 9, WIDTH)
LENGTHS = torch.tensor([5, 9, 9, 4])
TEXT, TEXT_LENGTHS = torch.randn(4, 9, WIDTH), torch.tensor([9, 3, 7, 2])
SAMPLES = numbered_samples(4)


def cut(x=X, lengths=LENGTHS, more=0):
    return [(x[i : i + 1, : n + more], lengths[i : i + 1]) for i, n in enumerate(lengths.tolist())]


def assert_counted(model, batches, alone, **options) -> None:
    """Compare the sums of each norm with those of its inputs in passes of each sample alone."""
    seen = normscope.capture(model.eval(), batches, **options)
    for name, calls in inputs_of(model, seen.stats, alone, lambda model, args: model(*args)).items():
        x = torch.cat([x.flatten().double() for x in calls])
        n, total, _, squares, *_ = seen.stats[name].moments.sum((0, 2)).tolist()
        assert (name, n) == (name, x.numel())
        assert total == pytest.approx(float(x.sum()), rel=1e-4, abs=1e-3)
        assert squares == pytest.approx(float(x.square().sum()), rel=1e-5)


def parts(**more):
    torch.manual_seed(0)
    return {"norm": nn.LayerNorm(WIDTH), "layer": nn.Linear(WIDTH, WIDTH), **more}


def masked(self, wavs, wav_lens=None):
    """speechbrain: shares of the longest."""
    shares = torch.ones(len(wavs)) if wav_lens is None else wav_lens
    valid = torch.arange(wavs.shape[1]) < (shares * wavs.shape[1]).round()[:, None]
    return self.norm(self.layer(wavs)) * valid[..., None]


def strided(self, audio_signal, length):
    """NeMo: channels before positions, of which a convolution leaves a half."""
    return self.norm(self.conv(audio_signal).mT), (length - 1) // 2 + 1


def packed(self, xs_pad, ilens):
    """ESPnet: recurrent layers on packed sequences."""
    x = pack_padded_sequence(xs_pad, ilens.cpu(), batch_first=True, enforce_sorted=False)
    return self.norm(pad_packed_sequence(self.rnn(x)[0], batch_first=True)[0]), ilens


def two_streams(self, speech, speech_lengths, text, text_lengths):
    padding = torch.arange(int(speech_lengths.max())) >= speech_lengths[:, None]
    speech = self.norm(speech)
    return self.last(text + self.attention(text, speech, speech, key_padding_mask=padding)[0])


CONV = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
ATTENTION = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
BOTH = [(*one, *other) for one, other in zip(cut(), cut(TEXT, TEXT_LENGTHS), strict=True)]
NETWORKS = {
    "relative": (masked, {}, (X, LENGTHS / 9), [(x,) for x, _ in cut()]),
    "strided": (strided, {"conv": CONV}, (X.mT.contiguous(), LENGTHS), [(x.mT, n) for x, n in cut()]),
    "padded further": (strided, {"conv": CONV}, (torch.randn(4, 8, 12), LENGTHS), None),
    "packed": (packed, {"rnn": nn.LSTM(WIDTH, WIDTH, batch_first=True)}, (X, LENGTHS), cut()),
    "two streams": (
        two_streams,
        {"last": nn.LayerNorm(WIDTH), "attention": ATTENTION},
        (X, LENGTHS, TEXT, TEXT_LENGTHS),
        BOTH,
    ),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_samples_are_counted_as_if_alone(case):
    forward, more, batch, alone = NETWORKS[case]
    model = network_of(forward, **parts(**more))
    alone = alone or [(x.mT, n) for x, n in cut(batch[0].mT)]
    assert_counted(model, [batch, batch], [*alone, *alone])


def test_names_of_arguments_come_from_keys_too():
    model = network_of(masked, **parts())
    alone = [(x,) for x, _ in cut()]
    assert_counted(model, [{"wavs": X, "wav_lens": LENGTHS / 9}], alone)
    assert_counted(model, [(X, LENGTHS / 9)], alone, forward=lambda model, batch: model(batch[0], batch[1]))
    by_key = {"x": X, "x_lens": LENGTHS}
    assert_counted(model, [by_key], alone, forward=lambda model, batch: model(batch["x"], batch["x_lens"] / 9))
    assert_counted(model, [Batch((X, LENGTHS / 9), samples=SAMPLES)], alone)


def test_masks_beside_lengths_are_cut_too():
    def forward(self, x, lengths, attention_mask):
        return self.norm(x * attention_mask[..., None])

    valid = (torch.arange(9) < LENGTHS[:, None]).float()
    alone = [(x, n, torch.ones(1, int(n))) for x, n in cut()]
    assert_counted(network_of(forward, **parts()), [(X, LENGTHS, valid)], alone)


def torchaudio_network(name):
    models = pytest.importorskip("torchaudio").models
    torch.manual_seed(0)
    if name == "Conformer":
        return models.Conformer(WIDTH, 2, 16, 1, 3)
    if name == "Emformer":
        return models.Emformer(WIDTH, 2, 16, 1, 4, right_context_length=3)
    convolutions = [(8, 10, 5), (8, 3, 2)]
    rest = (8, 0.0, 3, 4, 1, 2, 0.0, 16, 0.0, 0.0, name == "layer_norm", 0.0, None)
    return models.wav2vec2_model(name, convolutions, True, *rest)


@pytest.mark.parametrize("first", [9, 8])
def test_conformer(first):  # 9 frames of 8 features, or as many frames as features
    lengths = LENGTHS.clamp_max(first)
    assert_counted(torchaudio_network("Conformer"), [(X[:, :first], lengths)], cut(lengths=lengths))


@pytest.mark.parametrize("beyond", [3, 11])
def test_emformer_looks_ahead(beyond):
    x = torch.randn(4, 9 + beyond, WIDTH)
    assert_counted(torchaudio_network("Emformer"), [(x, LENGTHS)], cut(x, more=3))


@pytest.mark.parametrize("mode", ["layer_norm", "group_norm"])
def test_wav2vec2_counts_frames_of_the_waveforms_alone(mode):
    waveforms, lengths = torch.randn(3, 400), torch.tensor([400, 333, 150])
    assert_counted(torchaudio_network(mode), [(waveforms, lengths)], cut(waveforms, lengths))


def test_rnn_transducer_cuts_sources_and_targets():
    rnnt = pytest.importorskip("torchaudio").models.rnnt
    torch.manual_seed(0)
    sizes = {"input_dim": WIDTH, "encoding_dim": 8, "num_symbols": 20, "segment_length": 8, "symbol_embedding_dim": 8}
    transformer = {
        **{"num_heads": 2, "ffn_dim": 8, "num_layers": 1, "dropout": 0.0, "activation": "gelu"},
        **{"left_context_length": 4, "max_memory_size": 0, "weight_init_scale_strategy": None, "tanh_on_mem": False},
    }
    model = rnnt.emformer_rnnt_model(
        **sizes,
        **{f"transformer_{key}": value for key, value in transformer.items()},
        **{"right_context_length": 4, "time_reduction_input_dim": 4, "time_reduction_stride": 4},
        **{"num_lstm_layers": 1, "lstm_layer_norm": True, "lstm_layer_norm_epsilon": 1e-3, "lstm_dropout": 0.0},
    )
    sources, source_lengths = torch.randn(3, 28, WIDTH), torch.tensor([24, 16, 11], dtype=torch.int32)
    targets, target_lengths = torch.randint(0, 19, (3, 7)), torch.tensor([5, 7, 3], dtype=torch.int32)
    alone = zip(cut(sources, source_lengths, 4), cut(targets, target_lengths), strict=True)
    batch = (sources, source_lengths, targets, target_lengths)
    assert_counted(model, [batch], [(*source, *target) for source, target in alone])


def seen_together(self, x, **more):
    self.sizes.append(len(x))
    return self.norm(x)


def test_samples_as_long_as_the_batch_run_together():
    def forward(self, x, lengths):
        return seen_together(self, x)

    model = network_of(forward, **parts(), sizes=[])
    assert normscope.capture(model, [(X, torch.full((4,), 9))]).stats["norm"].n_tokens == 36
    assert 4 in model.sizes
    model.sizes.clear()
    assert normscope.capture(model, [(X, LENGTHS)]).stats["norm"].n_tokens == 27
    assert max(model.sizes) == 2  # those of one length


@pytest.mark.parametrize(
    "name", ["prompt_lens", "focal_length", "target_lengths", "max_length", "question_lengths", "silence"]
)
def test_arguments_of_such_names_that_mark_no_padding(name):
    model = network_of(lambda self, x, **_: self.norm(x), **parts())
    for value in (None, [], ["a", "b"], [[1], [2, 3]], torch.ones(4).bool(), torch.full((4,), 20)):
        assert normscope.capture(model, [{"x": X, "lengths": value}]).stats["norm"].n_tokens == 36
    assert normscope.capture(model, [{"x": X, name: LENGTHS}]).stats["norm"].n_tokens == 36


def two_norms(self, xs, ilens, ys, olens):
    return self.norm(xs), self.last(self.table(ys))


Y, Y_LENGTHS = torch.zeros(4, 6, dtype=torch.long), torch.tensor([6, 2, 6, 2])
NESTED = {"id": torch.arange(4), "net_input": {"src_tokens": X, "src_lengths": LENGTHS}}


@pytest.mark.parametrize(
    ("signature", "entry", "forward"),
    [
        ("x, lengths", (X, LENGTHS[:, None]), None),
        ("x, wav_lens", (X, (LENGTHS / 9).clamp(max=1) + (LENGTHS == 9) * 1.2e-7), None),
        ("src_tokens, src_lengths", NESTED, lambda model, batch: model(**batch["net_input"])),
        ("x, lengths", {"wav": X, "n": LENGTHS}, lambda model, batch: model(batch["wav"], lengths=batch["n"])),
        ("x, lengths", (LENGTHS, X), lambda model, batch: model(batch[1], batch[0])),
        ("x, lengths", (LENGTHS, X.mT), lambda model, batch: model(batch[1].mT, batch[0])),
        ("x, lengths", (X, LENGTHS), lambda model, batch: wrapped(model)(*batch)),
        *((f"x, {name}", (X, LENGTHS), None) for name in ("n_frames", "nframes", "input_sizes")),
        *((f"x, {name}", (X, LENGTHS), None) for name in ("n_tokens", "durations")),
        ("x, percents", (X, LENGTHS / 9), None),
        ("x, lengths", Batch((), {"x": X, "n": LENGTHS}, SAMPLES, forward=lambda model, x, n: model(x, n)), None),
    ],
)
def test_lengths_by_other_names_and_ways(signature, entry, forward):
    def call(self, *args, **kwargs):
        return self.norm([*args, *kwargs.values()][0])

    names = ["self", *signature.split(", ")]
    call.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    model = network_of(call, **parts())
    assert normscope.capture(model, [entry] * 2, forward=forward).stats["norm"].n_tokens == 54


def test_wrappers_and_targets():
    inner = network_of(lambda self, x, lengths: self.norm(x), **parts())
    seen = normscope.capture(wrapped(inner), [(X, LENGTHS), (X, torch.full((4,), 9)), (X, LENGTHS)])
    assert seen.stats["inner.norm"].n_tokens == 90
    model = network_of(two_norms, **parts(last=nn.LayerNorm(WIDTH), table=nn.Embedding(9, WIDTH)))
    stats = normscope.capture(model, [(X, LENGTHS, Y, Y_LENGTHS)]).stats
    assert (stats["norm"].n_tokens, stats["last"].n_tokens) == (27, 16)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("lengths", torch.tensor([9, 5, 5, 0]), "not every one is a positive"),
        ("lengths", torch.tensor([9.0, 5.5, 5, 1]), "not every one is a positive"),
        ("lengths", torch.tensor([9, 5, 5, torch.nan]), "not every one is a positive"),
        ("lengths", torch.tensor([12, 9, 5, 5]), "it exceeds every axis"),
        ("x_lens", torch.tensor([9, 5, 5]), "no tensor has as many samples"),
        ("lengths", LENGTHS.numpy(), "it is no tensor of the batch"),
        ("lengths", (LENGTHS / 9).tolist(), "it is no tensor of the batch"),
    ],
)
def test_lengths_with_an_odd_value_are_refused(name, values, why):
    model = network_of(lambda self, x, **_: self.norm(x), **parts())
    entry = {"x": X, name: values}
    with pytest.raises(DataError, match=rf"'{name}', .* seems to mark padding, but {why}"):
        normscope.capture(model, [entry], forward=lambda model, batch: model(**batch))
    valid = torch.arange(9) < LENGTHS[:, None]
    seen = normscope.capture(model, [Batch((X,), {name: values}, SAMPLES, valid=valid)])
    assert seen.stats["norm"].n_tokens == 27


VALID = torch.arange(9) < LENGTHS[:, None]
PAIRS = VALID[:, None, None] & VALID[:, None, :, None]
CAUSAL = torch.ones(9, 9).tril().bool()


@pytest.mark.parametrize(
    ("name", "mask", "refused"),
    [
        *(("attention_mask", mask, True) for mask in (VALID[:, None], PAIRS, PAIRS[:, 0] & CAUSAL)),
        ("attention_mask", (~VALID[:, None, None]) * torch.finfo().min, True),
        ("attention_mask", CAUSAL.expand(4, 1, 9, 9), False),
        ("attention_mask", torch.zeros(4, 1, 1, 9), False),
        ("src_key_padding_mask", ~VALID[:, None], True),
        *(
            (name, VALID, True)
            for name in ("mask", "masks", "x_mask", "pad_mask", "input_mask", "src_mask", "padding", "valid")
        ),
        *(("speech_mask", mask, True) for mask in (VALID[:, None], VALID[..., None].float(), VALID.long())),
        ("mask", torch.ones(4, 9), False),
        ("mask", torch.randn(4, 9), False),
        ("mask", CAUSAL, False),
        ("mask", VALID[:, :7], False),
        ("mask", VALID[:, None, None].expand(4, 1, 3, 9), False),
        *((name, VALID, False) for name in ("bool_masked_pos", "mask_time_indices", "token_type_ids", "head_mask")),
    ],
)
def test_masks_that_cannot_be_bound_are_refused(name, mask, refused):
    model = network_of(lambda self, x, **_: self.norm(x), **parts())
    entry = {"x": X if len(mask) == 4 else torch.randn(9, 9, WIDTH), name: mask}
    for forward in (None, lambda model, batch: model(**batch)):
        if refused:
            with pytest.raises(DataError, match=rf"The mask '{name}' \(4, .* Pass normscope.Batch"):
                normscope.capture(model, [entry], forward=forward)
        else:
            assert normscope.capture(model, [entry], forward=forward).stats["norm"].n_tokens == 9 * len(entry["x"])
    if refused:
        seen = normscope.capture(model, [Batch((X,), {name: mask}, SAMPLES, valid=VALID)])
        assert seen.stats["norm"].n_tokens == 27


def test_recordings_that_the_network_pads_are_refused_and_the_remedy_works():
    model = network_of(lambda self, wavs: self.norm(nn.utils.rnn.pad_sequence(wavs, batch_first=True)), **parts())
    recordings = [X[0, :5], X[1]]
    for entry, forward in (
        (recordings, lambda model, batch: model(batch)),
        ((recordings, torch.arange(2)), lambda model, batch: model(batch[0])),
    ):
        with pytest.raises(DataError, match=r"'wavs' is a list of tensors of unequal lengths, \[5, 9\]"):
            normscope.capture(model, [entry], forward=forward)
    seen = normscope.capture(model, [x[None] for x in recordings], forward=lambda model, x: model([*x]))
    assert seen.stats["norm"].n_tokens == 14


def test_a_network_of_one_length_is_refused_and_the_remedy_works():
    model = network_of(lambda self, x, lengths: self.norm(x + self.table), **parts(table=nn.Parameter(X[0].clone())))
    with pytest.raises(
        DataError, match=r"'lengths', \[5, 9, 9, 4\], seems to mark padding, but the network does not run on"
    ):
        normscope.capture(model, [(X, LENGTHS)])
    valid = torch.arange(9) < LENGTHS[:, None]
    seen = normscope.capture(model, [Batch((X, LENGTHS), samples=SAMPLES, valid=valid)])
    assert seen.stats["norm"].n_tokens == 27


def test_lengths_that_do_not_fit_their_batch_are_refused():
    pair = network_of(lambda self, x, y, lengths: self.norm(x) + y.mean(), **parts())
    entry = {"x": X, "y": torch.randn(3), "lengths": LENGTHS}  # one sample, as its tensors disagree
    with pytest.raises(DataError, match="the batch cannot be divided by samples"):
        normscope.capture(pair, [entry], forward=lambda model, batch: model(**batch))
    model = network_of(masked, **parts())
    padded = SimpleNamespace(signal=X, lengths=LENGTHS / 9)  # as speechbrain's loader returns them
    for batches, forward in (
        ([padded], lambda model, batch: model(batch.signal, batch.lengths)),
        ([padded], lambda model, batch: model(wavs=batch.signal, wav_lens=batch.lengths)),
        ([{"wavs": X, "lengths": LENGTHS.tolist()}], lambda model, batch: model(batch["wavs"])),
    ):
        with pytest.raises(DataError, match="it is no tensor of the batch"):
            normscope.capture(model, batches, forward=forward)
    whole = SimpleNamespace(signal=X, lengths=torch.ones(4))
    seen = normscope.capture(model, [whole], forward=lambda model, batch: model(batch.signal, batch.lengths))
    assert seen.stats["norm"].n_tokens == 36
    model = network_of(lambda self, x, **_: self.norm(x), **parts())
    with pytest.raises(DataError, match=r"'leaf_lens', .* of which argument is unclear"):
        normscope.capture(model, [{"x": X, "leaf_lens": LENGTHS}])
    square = network_of(lambda self, x, lengths: self.norm(x.mean((2, 3))), **parts())
    with pytest.raises(DataError, match="its axis is ambiguous"):
        normscope.capture(square, [(torch.randn(4, WIDTH, 12, 12), LENGTHS)])


def test_drift_is_that_of_the_samples_alone():
    model = torchaudio_network("Conformer").eval()
    seen = normscope.capture(model, [(X, LENGTHS)], layers="final")
    modules = normscope.replacements(model, "dyt", seen, init="paper")
    together = normscope.drift(model, [(X, LENGTHS)], modules)
    alone = normscope.drift(model, [Batch(args, samples=SAMPLES[i : i + 1]) for i, args in enumerate(cut())], modules)
    assert together.all.relative_l2.max == pytest.approx(alone.all.relative_l2.max, rel=1e-4)
    assert together.all.relative_l2.p50 == pytest.approx(alone.all.relative_l2.p50, rel=1e-4)
