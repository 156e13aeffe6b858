"""Norm cards as tables for a terminal: a row a site, or all numbers of one site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from normscope.show.tables.glossary import definitions
from normscope.show.tables.sinks import sink_sentence
from normscope.show.tables.table import NONE, Column, TextTable, names, number, several, table_of, words

if TYPE_CHECKING:
    from normscope.fits.card import NormCard, Tails
    from normscope.fits.saturation import OverChannels, Saturation
    from normscope.fits.scale import Scale


_NAMED = 3  # of a kind, on a whole card
_NAMED_IN_A_LINE = 2
_SMALLEST_SHARE = 0.0005  # less is rounded to 0.0 %
_NUMBERS_OF_CHANNELS = (1, 2, 4, 8, 16)  # that predict σ²


def card_tables(cards: Sequence[NormCard]) -> list[TextTable]:
    """Make the whole card of one site, or of several sites the tables of scale, saturation, tails and channels."""
    with_channels = [card for card in cards if card.scale is not None and card.scale.r2]
    channels = [channels_table(with_channels)] if with_channels else []
    if len(cards) == 1:
        return [card_table(cards[0]), *channels]
    norms = [card for card in cards if card.saturation is None]
    functions = [card.saturation for card in cards if card.saturation is not None]
    tables = [*([scale_table(norms)] if norms else []), *([saturation_table(functions)] if functions else [])]
    return [*tables, tails_table(cards), *channels]


def scale_table(cards: Sequence[NormCard]) -> TextTable:
    """Make a table with one line per site: effects of centring and scaling on its tokens."""

    def linear(card: NormCard) -> str:
        if card.straight:
            return "straight"
        return NONE if card.linear is None else _share(card.linear)

    columns: list[Column[NormCard]] = [
        names("site", lambda card: card.site),
        *several(("|μ|/σ", "95 %", "mean's share", "without"), _centring, (0, 0, 4, 1)),
        *several(("σ 5 %", "σ 50 %", "σ 95 %"), _scale, (3, 0, 3)),
        *several(("95:5", "eps", "holds to"), lambda card: _scale(card)[3:], (0, 5, 6)),
        Column("linear", linear, drop=2),
    ]
    return table_of(cards, columns, about="stats", remark=_nothing)


def _nothing(card: NormCard) -> str | None:
    return card.degenerate and f"{card.site}: {card.degenerate}"


def saturation_table(functions: Sequence[Saturation]) -> TextTable:
    """Make a table with one line per point-wise function: α and s, its range in use, and channels without one."""
    shifted = any(function.shift.p5 or function.shift.p95 for function in functions)
    columns: list[Column[Saturation]] = [
        names("site", lambda function: function.site),
        words("f", lambda function: function.curve, 4),
        Column("α", lambda function: _over_channels(function.alpha)),
        Column("s", lambda function: _over_channels(function.shift), shifted, drop=3),
        Column("slope", lambda function: _over_channels(function.slope), drop=7),
        *several(
            ("1/std", "α×std"), lambda function: [_number(function.inverse_std), _number(function.alpha_std)], (2, 6)
        ),
        *several((">1", ">2", ">3", "saturated"), _saturated, (5, 8, 5, 0)),
        Column("|weight|", lambda function: _over_channels(function.weight), drop=9),
        Column("stuck", lambda function: NONE if function.stuck is None else str(len(function.stuck)), drop=1),
        Column("dead", lambda function: str(len(function.dead)), drop=1),
    ]
    return table_of(functions, columns, about="stats")


def tails_table(cards: Sequence[NormCard]) -> TextTable:
    """Make a table with one line per site: large values and their places."""
    columns: list[Column[NormCard]] = [
        names("site", lambda card: card.site),
        *several(
            ("kurtosis", "median", "max |x|", "ratio", ">100×", "massive"),
            lambda card: _tails(card)[:6],
            (0, 4, 0, 3, 5, 0),
        ),
        words("channels", lambda card: _tails(card)[6], 1),
        words("tokens", lambda card: _tails(card)[7], 2),
        *several(("90 % of y²", "cosine"), lambda card: _tails(card)[8:], (7, 6)),
    ]
    sink = sink_sentence(cards)
    caption = [sink] if sink else []
    return table_of(cards, columns, caption=caption, about="stats", remark=_nothing)


def channels_table(cards: Sequence[NormCard]) -> TextTable:
    """Make a table with one line per site: its leading channels, their shares and γ, and held-out R² of σ²."""

    def cells(card: NormCard) -> list[str]:
        leading, r2 = card.tails.channels if card.tails else (), card.scale.r2 if card.scale else ()
        listed = [
            ", ".join(str(channel.channel) for channel in leading),
            *(", ".join(_share(getattr(channel, of)) for channel in leading) for of in ("share", "of_y", "of_output")),
            ", ".join(f"{channel.gamma:z.2f}" for channel in leading),
        ]
        return [*listed, *(f"{r2[k - 1]:.3f}" if k <= len(r2) else NONE for k in _NUMBERS_OF_CHANNELS)]

    headings = ("leading", "of Σx²", "of Σy²", "of Σ(γy)²", "γ : median", *(f"R² of {k}" for k in _NUMBERS_OF_CHANNELS))
    columns = [names("site", lambda card: card.site), *several(headings, cells, (0, 3, 4, 0, 2, 0, 5, 0, 6, 1))]
    return table_of(
        cards,
        columns,
        about="stats",
        caption=["from a second pass over the inputs · R²: held-out, of σ² from K channels"],
    )


def card_table(card: NormCard) -> TextTable:
    """Make the whole card of one site, with one line per question."""
    return table_of(card_lines(card), [words("", lambda line: line[0]), names("", lambda line: line[1])])


def card_lines(card: NormCard) -> Iterator[tuple[str, str]]:
    """Yield the questions and answers of a card, as plain text."""
    about = filter(None, (card.kind, card.placement, "" if card.saturation else f"eps {card.eps:g}"))
    yield "site", f"{card.site} ({', '.join(about)})"
    yield "seen", f"{card.n_pairs:,} pairs of {card.n_tokens:,} tokens"
    if card.saturation is not None:
        table = saturation_table([card.saturation])
        for heading, cell in list(zip(table.headings, table.rows[0], strict=True))[1:]:
            yield heading, f"{cell} ({definitions('stats')[heading]})"
    if card.degenerate or card.tails is None:
        yield "no numbers", card.degenerate or ""
        return
    if card.scale is not None:
        yield from _scale_answers(card, card.scale)
    yield from _tail_answers(card.tails)
    if sink := sink_sentence([card]):
        yield "sink", sink.partition(": ")[2]


def _scale_answers(card: NormCard, scale: Scale) -> Iterator[tuple[str, str]]:
    if card.centring is not None:
        p50, p95, share, without = _centring(card)
        yield "|μ|/σ", f"{p50} for half of the tokens, {p95} for 95 %"
        yield "the mean's share", f"{share} of a token's x²"
        yield "without centring", "it does not centre" if without == NONE else f"y is off by {without} of y² (RMSNorm)"
    p5, p50, p95, spread, touched, holds_to = _scale(card)
    yield "σ", f"{p5} to {p95} for nine tokens in ten, a factor of {spread}; median {p50}"
    if scale.holds_to_p50 is not None:
        yield "eps", f"lowers y by 1 % or more for {touched} of the tokens"
        half = _number(scale.holds_to_p50)
        yield "x can shrink", f"to {holds_to} of it before y changes by 1 %, for 99 % of the tokens; {half} for half"
    linear = "no tanh was found" if card.linear is None else f"{_share(card.linear)} of the pairs"
    yield "linear range", "all pairs: they do not bend" if card.straight else linear


def _tail_answers(tails: Tails) -> Iterator[tuple[str, str]]:
    yield "kurtosis of x", f"{_number(tails.kurtosis)} (3 for a normal distribution)"
    ratio = f"{_number(tails.ratio)} times the median, {_number(tails.median)}" if tails.median > 0 else "median 0"
    yield "largest |x|", f"{_number(tails.largest)} in channel {tails.channel}, {ratio}"
    if tails.beyond_100 is not None and tails.massive is not None:
        yield "far out", f"|x| > 100 × the median at {tails.beyond_100:,} pairs, > 1000 × at {tails.beyond_1000:,}"
        yield "massive activations", f"{tails.massive:,} (|x| > 100 and |x| > 1000 × the median)"
    for place, channel in enumerate(tails.channels):
        text = f"{channel.channel}: {_share(channel.share)} of Σx², from {_number(channel.low)} to"
        yield "" if place else "channels", f"{text} {_number(channel.high)}"
    yield "largest tokens", f"{_positions(tails, _NAMED)} (of the {len(tails.tokens)} of largest |x|)"
    for token in tails.tokens[:_NAMED]:
        sample = "" if token.sample is None else f"sample {token.sample}, "
        where = "" if token.channel is None else f", channel {token.channel}"
        yield "", f"{sample}token {token.position}{where}: x = {_number(token.x)}"
    if tails.elements is not None and tails.cosine is not None:
        cosine = f"mean cosine between two of the largest tokens: {number(tails.cosine, '.2f')}"
        yield "y", f"90 % of its squares in {_share(tails.elements)} of a token's elements; {cosine}"


def _saturated(function: Saturation) -> list[str]:
    shares = (function.beyond_1, function.beyond_2, function.beyond_3, function.saturated)
    return [NONE if share is None else _share(share) for share in shares]


def _over_channels(spread: OverChannels | None) -> str:
    """A number, or its median with the 5th and 95th percentiles over channels that differ."""
    if spread is None:
        return NONE
    ends = "" if spread.p5 == spread.p95 else f" ({spread.p5:.2g} to {spread.p95:.2g})"
    return f"{_number(spread.p50)}{ends}"


def _centring(card: NormCard) -> list[str]:
    centring = card.centring
    if centring is None:
        return [NONE] * 4
    without = NONE if centring.change_without is None else _share(centring.change_without)
    return [_number(centring.offset_p50), _number(centring.offset_p95), _share(centring.mean_share), without]


def _scale(card: NormCard) -> list[str]:
    scale = card.scale
    if scale is None:
        return [NONE] * 6
    sigmas = [_number(sigma) for sigma in (scale.sigma_p5, scale.sigma_p50, scale.sigma_p95, scale.spread)]
    if scale.touched is None or scale.holds_to is None:
        return [*sigmas, NONE, NONE]
    return [*sigmas, _share(scale.touched), _number(scale.holds_to)]


def _tails(card: NormCard) -> list[str]:
    tails = card.tails
    assert tails is not None  # noqa: S101 - a card without tails is degenerate, and says why
    return [
        *(_number(value) for value in (tails.kurtosis, tails.median, tails.largest)),
        _number(tails.ratio) if tails.median > 0 else NONE,
        *(NONE if pairs is None else f"{pairs:,}" for pairs in (tails.beyond_100, tails.massive)),
        ", ".join(f"{channel.channel}: {_share(channel.share)}" for channel in tails.channels[:_NAMED_IN_A_LINE]),
        _positions(tails, _NAMED_IN_A_LINE),
        NONE if tails.elements is None else _share(tails.elements),
        NONE if tails.cosine is None else number(tails.cosine, ".2f"),
    ]


def _positions(tails: Tails, most: int) -> str:
    """Name the positions that most of the largest tokens have."""
    positions = tails.positions
    if len(positions) == 1:
        return f"all are token {positions[0][0]}"
    if positions[0][1] == 1 and len(positions) > most:
        return f"{len(positions)} different ones"
    named = ", ".join(f"{position} ({tokens})" for position, tokens in positions[:most])
    return named if len(positions) <= most else f"{named}, …"


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _share(share: float) -> str:
    """A share in percent; what is not zero does not read as 0.0 %."""
    if 0 < share < _SMALLEST_SHARE:
        return "<0.1 %"
    return f"{100 * share:.1f} %"
