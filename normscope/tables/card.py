"""Norm cards as tables for a terminal: a row a site, or all that is known of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.tables.table import NARROWEST_NAME, as_cell, table_by_site, unbroken

if TYPE_CHECKING:
    from normscope.fits.views.card import NormCard, Tails, TailToken

_NAMED = 3  # of a kind, on a whole card
_NAMED_IN_A_LINE = 2
_SMALLEST_SHARE = 0.0005  # less is rounded to 0.0 %
_NONE = "–"


def scale_table(cards: Sequence[NormCard]) -> Table:
    """One line a site: what centring and scaling do to its tokens."""
    table = table_by_site(
        "|μ|/σ", "95 %", "mean's share", "without", "σ 5 %", "50 %", "95 %", "95:5", "eps", "holds to", "linear"
    )
    for card in cards:
        if card.degenerate:
            table.add_row(as_cell(card.site), card.degenerate)
            continue
        table.add_row(as_cell(card.site), *_centring(card), *_scale(card), _linear(card))
    table.caption = (
        "|μ|/σ: median and 95th percentile over tokens · mean's share: of a token's x² · without centring: "
        "Σ(y − RMSNorm(x))²/Σy² · σ: percentiles over tokens, and how many times the 5th the 95th is · eps: share of "
        "tokens whose y it lowers by 1 % · holds to: the c down to which y(c·x) = y(x), to 1 % for 99 % of the tokens "
        "· linear: share of pairs where the tanh fitted is within 5 % of its tangent"
    )
    return unbroken(table)


def tails_table(cards: Sequence[NormCard]) -> Table:
    """One line a site: what is large, and where it is."""
    table = table_by_site("kurtosis", "median", "max |x|", "ratio", ">100×", "massive")
    table.add_column("channels: of Σx²", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    for card in cards:
        if card.tails is None:
            table.add_row(as_cell(card.site), card.degenerate)
            continue
        tails = card.tails
        counts = (tails.beyond_100, tails.massive)
        channels = ", ".join(f"{own.channel}: {_share(own.share)}" for own in tails.channels[:_NAMED_IN_A_LINE])
        table.add_row(
            as_cell(card.site),
            *(_number(number) for number in (tails.kurtosis, tails.median, tails.largest)),
            _number(tails.ratio) if tails.median > 0 else _NONE,
            *(_NONE if number is None else f"{number:,}" for number in counts),
            channels,
            _positions(tails, _NAMED_IN_A_LINE),
        )
    table.caption = (
        "kurtosis: of x, 3 for a normal distribution · median, max: of |x|; ratio of the two; >100×: pairs beyond 100 "
        "times the median · massive: pairs beyond 100 and beyond 1000 times the median (arXiv 2402.17762) · tokens: "
        "numbers, within their samples, of the 16 tokens of largest |x|, and how many have each"
    )
    return unbroken(table)


def card_table(card: NormCard) -> Table:
    """All of one site's card, a line a question."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold", min_width=2 * NARROWEST_NAME)
    kind = f"{card.kind}, {card.placement}" if card.placement else card.kind
    table.add_row("site", as_cell(f"{card.site} ({kind}, eps {card.eps:g})"))
    table.add_row("seen", f"{card.n_pairs:,} pairs of {card.n_tokens:,} tokens")
    if card.degenerate or card.tails is None or card.scale is None:
        table.add_row("nothing to say", card.degenerate)
        return table
    if card.centring is not None:
        p50, p95, share, without = _centring(card)
        table.add_row("|μ|/σ", f"{p50} for half of the tokens, {p95} for 95 %")
        table.add_row("the mean's share", f"{share} of a token's x²")
        table.add_row(
            "without centring", "it does not centre" if without == _NONE else f"y is off by {without} of y² (RMSNorm)"
        )
    p5, p50, p95, spread, touched, holds_to = _scale(card)
    table.add_row("σ", f"{p5} to {p95} for nine tokens in ten, a factor of {spread}; median {p50}")
    if card.scale.holds_to_p50 is not None:
        table.add_row("eps", f"lowers y by 1 % or more for {touched} of the tokens")
        half = _number(card.scale.holds_to_p50)
        table.add_row("y(c·x) = y(x)", f"to 1 % down to c = {holds_to} for 99 % of the tokens, {half} for half")
    linear = "no tanh was found" if card.linear is None else f"{_share(card.linear)} of the pairs"
    table.add_row("linear range", "all pairs: they do not bend" if card.straight else linear)
    _add_tails(table, card.tails)
    return table


def _add_tails(table: Table, tails: Tails) -> None:
    table.add_row("kurtosis of x", f"{_number(tails.kurtosis)} (3 for a normal distribution)")
    ratio = f"{_number(tails.ratio)} times the median, {_number(tails.median)}" if tails.median > 0 else "median 0"
    table.add_row("largest |x|", f"{_number(tails.largest)} in channel {tails.channel}, {ratio}")
    if tails.beyond_100 is not None and tails.massive is not None:
        beyond = f"{tails.beyond_100:,} pairs beyond 100 times the median, {tails.beyond_1000:,} beyond 1000"
        table.add_row("far out", beyond)
        table.add_row("massive activations", f"{tails.massive:,} (beyond 100 and beyond 1000 times the median)")
    for number, own in enumerate(tails.channels):
        text = f"{own.channel}: {_share(own.share)} of Σx², from {_number(own.low)} to {_number(own.high)}"
        table.add_row("" if number else "channels", text)
    table.add_row("largest tokens", f"{_positions(tails, _NAMED)} (of the {len(tails.tokens)} of largest |x|)")
    for token in tails.tokens[:_NAMED]:
        table.add_row("", _place(token))


def _centring(card: NormCard) -> list[str]:
    if card.centring is None:
        return [_NONE] * 4
    own = card.centring
    without = _NONE if own.change_without is None else _share(own.change_without)
    return [_number(own.offset_p50), _number(own.offset_p95), _share(own.mean_share), without]


def _scale(card: NormCard) -> list[str]:
    own = card.scale
    if own is None:
        return [_NONE] * 6
    sigmas = [_number(number) for number in (own.sigma_p5, own.sigma_p50, own.sigma_p95, own.spread)]
    if own.touched is None or own.holds_to is None:
        return [*sigmas, _NONE, _NONE]
    return [*sigmas, _share(own.touched), _number(own.holds_to)]


def _linear(card: NormCard) -> str:
    if card.straight:
        return "straight"
    return _NONE if card.linear is None else _share(card.linear)


def _positions(tails: Tails, most: int) -> str:
    """Name the positions that most of the largest tokens have."""
    found = tails.positions
    if len(found) == 1:
        return f"all are token {found[0][0]}"
    if found[0][1] == 1 and len(found) > most:
        return f"{len(found)} different ones"
    named = ", ".join(f"{position} ({count})" for position, count in found[:most])
    return named if len(found) <= most else f"{named}, …"


def _place(token: TailToken) -> str:
    sample = "" if token.sample is None else f"sample {token.sample}, "
    channel = "" if token.channel is None else f", channel {token.channel}"
    return f"{sample}token {token.position}{channel}: x = {_number(token.x)}"


def _number(number: float) -> str:
    if math.isinf(number):
        return "∞"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"


def _share(share: float) -> str:
    """Say a share in percent; what is not zero is not said to be."""
    if 0 < share < _SMALLEST_SHARE:
        return "<0.1 %"
    return f"{100 * share:.1f} %"
