"""Batches of users' own loaders, against the same tensors in a Batch."""

import copy
import logging
from collections import namedtuple

import pytest
import torch
from networks import Detector, OneNorm, network_of, numbered_samples
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import normscope
from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.batch import Batch, as_batches
from normscope.inputs.held_out import learned_and_held_out

WIDTH = 8


class Masked(OneNorm):
    """As timm's ViT is called: what comes second is a mask, and a label would be taken for one."""

    def forward(self, x, attn_mask=None):
        assert attn_mask is None or attn_mask.ndim == 2
        return self.norm(x if attn_mask is None else x * attn_mask[..., None])


class Lengths(OneNorm):
    def forward(self, x, lengths=None):
        assert lengths is not None
        return self.norm(x * lengths[:, None, None])


class Named(OneNorm):
    def forward(self, pixel_values, labels=None):
        return self.norm(pixel_values)


class Anything(OneNorm):
    def forward(self, *args, **kwargs):
        return self.norm(args[0] if args else kwargs["x"])


x, y = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(6)


def sums_of(model, batches, **options):
    torch.manual_seed(0)
    return normscope.capture(model, batches, **options).stats["norm"]


def assert_as_by_hand(stats, model=None, by_hand=x):
    truth = sums_of(model or OneNorm(), [Batch((by_hand,), samples=numbered_samples(len(by_hand)))])
    assert torch.equal(stats.moments[:, 0].sum(0), truth.moments[:, 0].sum(0))
    # float64 sums of the same numbers in another order.
    torch.testing.assert_close(stats.moments.sum(0), truth.moments.sum(0), rtol=1e-12, atol=1e-9)


Pair = namedtuple("Pair", "image label")
LABELLED = {
    "a DataLoader of (x, label)": (OneNorm, DataLoader(TensorDataset(x, y), batch_size=4)),
    "of a network with a mask": (Masked, DataLoader(TensorDataset(x, y), batch_size=4)),
    "captions": (Masked, [(x, ["a", "b", "c", "d", "e", "f"])]),
    "a dict under other names": (OneNorm, [{"image": x, "label": y}]),
    "a dict with the network's name": (Named, [{"pixel_values": x, "target": y}]),
    "a dict with labels of the network's": (Named, [{"pixel_values": x, "labels": y}]),
    "a namedtuple in order": (OneNorm, [Pair(x, y)]),
    "a network of any arguments": (Anything, [{"x": x, "label": y}]),
    "compiled": (lambda: torch.compile(OneNorm(), backend="eager"), [(x, y)]),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_beside_the_inputs_are_omitted(name):
    make, batches = LABELLED[name]
    assert_as_by_hand(sums_of(make(), batches))


def test_one_warning_names_the_omitted_entries(caplog):
    with caplog.at_level(logging.WARNING):
        normscope.capture(Masked(), DataLoader(TensorDataset(x, y), batch_size=2))
    (record,) = caplog.records
    omitted = "Of each batch entry 1 (int64 (2,)) is left out: the forward of Masked takes x and attn_mask."
    assert record.getMessage().startswith(omitted)
    assert record.getMessage().endswith("To pass more, use forward=lambda model, batch: model(…).")


@pytest.mark.slow
def test_drift_and_healing_omit_labels_too_and_warn_once_for_each_loader(caplog):
    torch.manual_seed(0)
    model, loader = nn.Sequential(OneNorm(), nn.Linear(WIDTH, 2)), DataLoader(TensorDataset(x, y), batch_size=3)
    by_hand = [Batch((x,), samples=numbered_samples(len(x)))]
    seen = normscope.capture(model, by_hand, by_gamma=True)
    modules = normscope.replacements(model, "dyt", seen)
    with caplog.at_level(logging.WARNING):
        moved = normscope.drift(model, loader, modules)
    assert [record.getMessage().partition(" is")[0] for record in caplog.records] == [
        "Of each batch entry 1 (int64 (3,))"
    ]
    # Batches of other sizes: float32 sums in another order.
    assert moved.all.relative_l2.p50 == pytest.approx(
        normscope.drift(model, by_hand, modules).all.relative_l2.p50, rel=1e-5
    )
    drifts = []
    for learn, held_out in ((loader, loader), ([x[:3], x[3:]], [x[:3], x[3:]])):
        swapped = copy.deepcopy(model)
        normscope.swap(swapped, "dyt", seen)
        drifts.append(normscope.heal(model, swapped, learn, held_out, steps=2).before["median"])
    assert drifts[0] == drifts[1] > 0


def test_lengths_and_masks_that_a_network_requires_are_no_labels():
    lengths = torch.full((6,), 5)
    assert_as_by_hand(sums_of(Lengths(), [(x, lengths)]), by_hand=x * lengths[:, None, None])
    mask = (torch.arange(5) < 3).float().expand(6, 5)
    assert_as_by_hand(sums_of(Masked(), [(x, mask)]), by_hand=x * mask[..., None])


class Recordings:
    """A data set as a DataLoader takes it."""

    def __len__(self):
        return len(x)

    def __getitem__(self, number):
        return x[number]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([x[:4], x[4:]])


def test_loaders_of_whole_batches_are_read():
    by_number = DataLoader(TensorDataset(x), sampler=BatchSampler(range(6), 4, False), batch_size=None)
    for batches in (Stream(), DataLoader(Stream(), batch_size=None), by_number, DataLoader(Recordings(), 4)):
        assert sums_of(OneNorm(), batches).n_tokens == 30
    assert sums_of(OneNorm(), iter(DataLoader([x[:4], x[4:]], batch_size=None))).n_tokens == 30


SINGLE = [
    (x, r"a single Tensor \(6, 5, 8\), X\. Pass a list of them: \[X\]"),
    (x.numpy(), r"a single ndarray \(6, 5, 8\), X\. Pass a list of them: \[torch\.from_numpy\(X\)\]"),
    ({"x": x}, r"a single dict, X\. Pass a list of them: \[X\]"),
    (Batch((x,), samples=numbered_samples(6)), r"a single Batch, X\. Pass a list of them: \[X\]"),
    (TensorDataset(x), r"a TensorDataset of single samples\. Pass torch\.utils\.data\.DataLoader\(dataset, "),
    (Recordings(), r"a Recordings of single samples\. Pass torch\.utils\.data\.DataLoader\(dataset, batch_size"),
    (DataLoader(TensorDataset(x), batch_size=None), r"a DataLoader of single samples\. Pass torch\.utils\.data\.Data"),
    (3, r"The batches are 3\. Pass an iterable of batches, \[x\] of a single one x"),
    (len, r"The batches are <built-in function len>\. Pass an iterable"),
]


@pytest.mark.parametrize(("single", "error"), SINGLE)
def test_a_single_batch_in_place_of_several_is_refused(single, error):
    with pytest.raises(UsageError, match=error):
        normscope.capture(OneNorm(), single)


def test_every_step_refuses_a_single_batch():
    model = OneNorm()
    seen, swapped = normscope.capture(model, [x]), copy.deepcopy(model)
    normscope.swap(swapped, "dyt", seen)
    modules = normscope.replacements(model, "dyt", seen)
    for call in (
        lambda: normscope.capture(model, x, forward=lambda model, batch: model(batch)),
        lambda: normscope.drift(model, x, modules),
        lambda: normscope.simplify(model, x),
        lambda: normscope.calibrate(model, swapped, x),
        lambda: normscope.heal(model, swapped, [x], x),
        lambda: normscope.keep(model, x, modules, max_drift=1.0),
        lambda: normscope.Probe(model, x, samples=2),
        lambda: learned_and_held_out(x),
    ):
        with pytest.raises(UsageError, match=SINGLE[0][1]):
            call()


def test_find_norms_takes_an_entry():
    for entry in (x, {"x": x}):
        assert [site.name for site in normscope.find_norms(OneNorm(), entry).sites] == ["norm"]


def test_optional_lengths_are_no_labels():
    def forward(self, x, x_lens=None):
        return self.norm(x)

    lengths = torch.tensor([5, 2, 2, 4, 5, 5])
    assert sums_of(network_of(forward, norm=nn.LayerNorm(WIDTH)), [(x, lengths)]).n_tokens == int(lengths.sum())


def test_a_mask_that_a_network_has_no_name_for_is_not_omitted():
    with pytest.raises(ModelError, match="unexpected keyword argument 'attention_mask'"):
        normscope.capture(OneNorm(), [{"x": x, "attention_mask": torch.ones(6, 5)}])


def test_images_of_a_list_run_one_by_one():
    images = [torch.rand(3, height, WIDTH) for height in (4, 5, 6)]
    targets = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}] * 3
    truth = torch.cat([image.double().flatten() for image in images])
    for batches in ([(images, targets)], [images], [(images,)]):
        seen = normscope.capture(Detector(), batches)
        assert seen.n_samples == 3 and seen.stats["norm"].n_pairs == len(truth)
        torch.testing.assert_close(seen.stats["norm"].moments[:, 1].sum(), truth.sum())


class Record:
    """No tensor, tuple or dict: a graph's, or a simulation's own."""

    def __init__(self, values):
        self.values = values


def test_forward_takes_entries_of_any_kind():
    records = [Record(x[:4]), Record(x[4:])]
    with pytest.raises(DataError, match=r"a batch is a tensor.* forward=lambda model, batch: …"):
        normscope.capture(OneNorm(), records)
    seen = normscope.capture(OneNorm(), records, forward=lambda model, batch: model(batch.values))
    assert seen.n_samples == 2  # each record is one, as their sizes are unknown
    assert_as_by_hand(seen.stats["norm"])


@pytest.mark.parametrize(
    "entry", [(x, y), {"x": x, "more": [y, {"z": x}]}, Pair(x, y), [x, y]], ids=lambda e: type(e).__name__
)
def test_samples_of_an_entry_are_counted_if_its_tensors_agree(entry):
    def forward(model, batch):
        return model(batch["x"] if isinstance(batch, dict) else batch[0])

    seen = normscope.capture(OneNorm(), [entry], forward=forward)
    assert seen.n_samples == 6 and seen.stats["norm"].fold_by == "source"
    assert_as_by_hand(seen.stats["norm"])


def test_padding_in_entries_for_forward_is_excluded():
    mask = torch.arange(5) < torch.tensor([1, 2, 3, 4, 5, 5])[:, None]
    entry = {"x": x, "attention_mask": mask}
    seen = normscope.capture(OneNorm(), [entry], forward=lambda model, batch: model(batch["x"]))
    assert seen.stats["norm"].n_tokens == 20
    assert_as_by_hand(seen.stats["norm"], by_hand=x[mask][:, None])


def test_a_batch_may_contain_its_own_forward():
    network = nn.Sequential(OneNorm(), nn.Linear(WIDTH, 2))
    batch = Batch((Record(x[:1]),), samples=numbered_samples(1), forward=lambda model, batch: model(batch.values))
    seen = normscope.capture(network, [batch], by_gamma=True)
    report = normscope.drift(network, [batch], normscope.replacements(network, "dyt", seen))
    with torch.no_grad():
        original = network(x[:1])
        with normscope.swap(network, "dyt", seen):
            moved = network(x[:1])
    assert report.all.relative_l2.p50 == pytest.approx(float((moved - original).norm() / original.norm()), rel=1e-5)


def test_a_loader_is_started_once():
    class Started(list):
        times = 0

        def __iter__(self):
            Started.times += 1
            return super().__iter__()

    normscope.capture(OneNorm(), Started([(x, y)]))
    assert Started.times == 1  # each start of a DataLoader with workers starts processes


def test_a_factory_may_return_a_loader_with_labels(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(): return nn.Sequential(nn.LayerNorm(8)), [(torch.arange(96.0).view(6, 2, 8), torch.arange(6))]\n"
    )
    assert normscope.capture(normscope.load(f"py:{tmp_path / 'own.py'}:make", device="cpu")).stats["0"].n_pairs == 96


def test_without_a_network_no_entry_is_omitted():
    (batch,) = as_batches([(x, y)])
    assert len(batch.args) == 2
