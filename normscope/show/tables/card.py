"""Norm cards as tables for a terminal, a row a site, and the sinks in their tails as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscope.errors import count
from normscope.runtime.files import visible
from normscope.show.tables.table import (
    NONE,
    Column,
    TextTable,
    names,
    number,
    percent,
    rounded,
    several,
    table_of,
    words,
)

if TYPE_CHECKING:
    from normscope.fits.card import NormCard, Tails
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.saturation import OverChannels, Saturation

_SHARE = ".1%"  # form of numbers
_NAMED = 2  # channels or positions in a cell
_NUMBERS_OF_CHANNELS = (1, 2, 4, 8, 16)  # that predict σ²


def card_tables(cards: Sequence[NormCard]) -> list[TextTable]:
    """Make the tables of scale, saturation and tails, and of channels after a second pass."""
    norms = [card for card in cards if card.saturation is None]
    functions = [card.saturation for card in cards if card.saturation is not None]
    tables = [*([scale_table(norms)] if norms else []), *([saturation_table(functions)] if functions else [])]
    with_channels = [card for card in cards if card.scale is not None and card.scale.r2]
    return [*tables, tails_table(cards), *([channels_table(with_channels)] if with_channels else [])]


def scale_table(cards: Sequence[NormCard]) -> TextTable:
    """Make a table with one line per site: effects of centring and scaling on its tokens."""
    columns: list[Column[NormCard]] = [
        names("site", lambda card: card.site),
        *several(("|μ|/σ", "95%", "mean's share", "without"), _centring, (0, 0, 4, 1)),
        *several(("σ 5%", "σ 50%", "σ 95%"), _scale, (3, 0, 3)),
        *several(("95:5", "eps", "holds to"), lambda card: _scale(card)[3:], (0, 5, 6)),
        Column("linear", lambda card: "straight" if card.straight else number(card.linear, _SHARE), drop=2),
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
            ("1/std", "α×std"), lambda function: [rounded(function.inverse_std), rounded(function.alpha_std)], (2, 6)
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
        *several(("90% of y²", "cosine"), lambda card: _tails(card)[8:], (7, 6)),
    ]
    sink = sink_sentence(cards)
    caption = [sink] if sink else []
    return table_of(cards, columns, caption=caption, about="stats", remark=_nothing)


def channels_table(cards: Sequence[NormCard]) -> TextTable:
    """Make a table with one line per site: its leading channels, their shares and γ, and held-out R² of σ²."""

    def cells(card: NormCard) -> list[str]:
        leading, r2 = card.tails.channels if card.tails else (), card.scale.r2 if card.scale else ()
        shares = ([number(getattr(row, of), _SHARE) for row in leading] for of in ("share", "of_y", "of_output"))
        lists = [[str(row.channel) for row in leading], *shares, [f"{row.gamma:z.2f}" for row in leading]]
        return [*map(", ".join, lists), *(f"{r2[k - 1]:.3f}" if k <= len(r2) else NONE for k in _NUMBERS_OF_CHANNELS)]

    headings = ("leading", "of Σx²", "of Σy²", "of Σ(γy)²", "γ : median", *(f"R² of {k}" for k in _NUMBERS_OF_CHANNELS))
    columns = [names("site", lambda card: card.site), *several(headings, cells, (0, 3, 4, 0, 2, 0, 5, 0, 6, 1))]
    return table_of(
        cards,
        columns,
        about="stats",
        caption=["from a second pass over the inputs · R²: held-out, of σ² from K channels"],
    )


def _saturated(function: Saturation) -> list[str]:
    shares = (function.beyond_1, function.beyond_2, function.beyond_3, function.saturated)
    return [number(share, _SHARE) for share in shares]


def _over_channels(spread: OverChannels | None) -> str:
    """A number, or its median with the 5th and 95th percentiles over channels that differ."""
    if spread is None:
        return NONE
    ends = "" if spread.p5 == spread.p95 else f" ({spread.p5:.2g} to {spread.p95:.2g})"
    return f"{rounded(spread.p50)}{ends}"


def _centring(card: NormCard) -> list[str]:
    centring = card.centring
    if centring is None:
        return [NONE] * 4
    shares = (centring.mean_share, centring.change_without)
    return [rounded(centring.offset_p50), rounded(centring.offset_p95), *(number(share, _SHARE) for share in shares)]


def _scale(card: NormCard) -> list[str]:
    scale = card.scale
    if scale is None:
        return [NONE] * 6
    sigmas = [rounded(sigma) for sigma in (scale.sigma_p5, scale.sigma_p50, scale.sigma_p95, scale.spread)]
    if scale.touched is None or scale.holds_to is None:
        return [*sigmas, NONE, NONE]
    return [*sigmas, number(scale.touched, _SHARE), rounded(scale.holds_to)]


def _tails(card: NormCard) -> list[str]:
    tails = card.tails
    assert tails is not None  # noqa: S101 - a card without tails is degenerate, and says why
    return [
        *(rounded(value) for value in (tails.kurtosis, tails.median, tails.largest)),
        rounded(tails.ratio) if tails.median > 0 else NONE,
        *(NONE if pairs is None else f"{pairs:,}" for pairs in (tails.beyond_100, tails.massive)),
        ", ".join(f"{channel.channel}: {number(channel.share, _SHARE)}" for channel in tails.channels[:_NAMED]),
        _positions(tails),
        number(tails.elements, _SHARE),
        number(tails.cosine, ".2f"),
    ]


def _positions(tails: Tails) -> str:
    """Name the positions that most of the largest tokens have."""
    positions = tails.positions
    if len(positions) == 1:
        return f"all are token {positions[0][0]}"
    if positions[0][1] == 1 and len(positions) > _NAMED:
        return f"{len(positions)} different ones"
    named = ", ".join(f"{position} ({tokens})" for position, tokens in positions[:_NAMED])
    return named if len(positions) <= _NAMED else f"{named}, …"


def sink_sentence(records: Sequence[CurveFit | NormCard]) -> str | None:
    """Describe the sink that changes R² most, and the number of further sites with one; None if there is none.

    Of several records of one site, the first counts.
    """
    sinks = {record.site: record.sink for record in reversed(records) if record.sink}
    if not sinks:
        return None

    def gain(site: str) -> tuple[float, float]:
        r2, without, share = sinks[site].r2, sinks[site].r2_without, sinks[site].share
        return (-1.0 if r2 is None or without is None else without - r2), share

    site = max(sinks, key=gain)
    sink, more = sinks[site], len(sinks) - 1
    share = percent(sink.share) if sink.share < 0.995 else "over 99%"
    text = f"{visible(site)}: position {sink.position} carries {share} of Σx²"
    if sink.r2_without is not None:
        with_it = f"({sink.r2:.3f} with it): --skip {sink.position + 1}"
        text += f"; without it {sink.curve}'s R² (of all pairs) is {sink.r2_without:.3f} {with_it}"
    return text + (f"; likewise at {count(more, 'further site')}" if more else "")
