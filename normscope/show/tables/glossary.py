"""Definitions of all terms and of the columns of all tables: for captions, tooltips and docs/glossary.md."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

COMMON = "Columns of several tables"
TERMS = "Terms"
# A definition per term or heading, without a full stop at its end, by the table that has the column.
DEFINITIONS: dict[str, dict[str, str]] = {
    TERMS: {
        "pair": "one element x of a norm's input and the same element y of its output before weight and bias",
        "token": "one vector that a norm normalizes, such as a patch, a frame or a word piece",
        "channel": "an index within a token",
        "straight": "the pairs do not bend, so that only the slope A·α is identified",
        "A and α not identified": "the pairs do not reach the bend of a curve with slope 0 or ∞ at its origin",
        "E[y|x]": "mean of y at each x, estimated from the pairs; also called the conditional mean, or free",
        "fold": "one of eight parts of the inputs, by source, left out in turn for intervals and held-out numbers",
        "±": "half of the 95% interval, from a jackknife over the folds",
        "tail": "pairs with the largest |x|; each table states where its tail begins",
        "massive activation": "|x| > 100 and |x| > 1000 × the median of |x| (arXiv 2402.17762)",
        "capture": "file or object with the sums over all pairs of a run; commands accept it in place of a model",
        "point-wise function": "module that replaces a norm: weight·f(αx + s) + bias, element by element",
        "swap": "replacement of norms by point-wise functions",
        "drift": "change of the network's output after a swap, relative to the original",
        "relative L2": "‖swapped − original‖ / ‖original‖ of an output",
        "calibration": "refit of the functions and of linear layers beside them, without gradients",
        "healing": "training of a swapped network towards the outputs of the original",
        "held out": "measured on inputs that were not used to fit or to choose anything",
        "built-in text": "text in the package, the default input of language models",
        "report": "HTML file that `normscope report` writes",
    },
    COMMON: {
        "#": "number of the site, from 0 in the order of calls",
        "site": "one norm in the network, named by its module path",
        "placement": "pre-norm, post-norm, qk (on queries or keys) or final; – for a norm beside the residual stream",
        "d": "number of channels of a token; for GroupNorm and BatchNorm, of the elements that share one statistic",
        "curve": "y ≈ A·f(αx + s) with a fixed f, such as tanh (dyt); module's f: a point-wise site's own",
        "A": "amplitude: the curve's height, in units of y",
        "α": "scale of x, in units of 1/x",
        "s": "shift inside f; not the bias of the swapped layer",
        "slope": "slope of the fitted curve at x = 0, A·α·f′(s)",
        "R²": "1 minus the mean squared error over the variance of y",
        "ceiling": "held-out R² of the best function of x found; an estimate of the best R² possible, not a bound",
        "saturated": "share of the pairs where |f′| is under 5% of its peak",
        "|μ|/σ": "distance of a token's mean from zero, in units of its σ: median over tokens",
        "95:5": "95th over 5th percentile of σ: the spread that bends the S-curve",
        "f": "function of a point-wise module, weight·f(αx + s) + bias",
        "1/std": "1 over the standard deviation of all x",
        **{f">{end}": f"share of pairs with |αx + s| over {end}" for end in (1, 2, 3)},
        "norm": "class of the norm",
        "kind": "class of the norm",
        "sites": "number of sites",
        "pairs": "number of pairs",
        "max |x|": "largest |x|",
        "norms": "original, or the function in place of the norms",
        "func": "function in place of the norms",
        "init": "start values of the functions: fit, theory, paper or calibrated",
        "median": "median over the inputs",
        "L2": "relative L2 at the network's output, median over inputs",
        "KL": "KL(original ‖ swapped) of the answers in nats, median over inputs",
        "p90 of L2": "90th percentile over the same inputs; likewise of KL and others",
        "p10 of cosine": "10th percentile over the same inputs",
        "inputs": "number of inputs measured",
    },
    "fit": {
        "params": "number of free parameters",
        "held-out R²": "R² on folds that the curve was not fitted to",
        "RMSE": "root of the mean squared error, in units of y",
        "tail": "RMSE beyond the 99th percentile of |x|",
        "rank": "by held-out error among curves with as many free parameters; ≈: not distinguishable from the first",
    },
    "fit --per channel": {
        "channels": "number of channels",
        "α PERCENTILE": "percentile of α over the channels",
        "R² PERCENTILE": "percentile of R² over the channels",
        "bend": "number of channels whose pairs identify A and α separately",
        "nothing": "number of channels without pairs to fit",
    },
    "fit --per token": {
        "tokens": "number of tokens",
        "PERCENTILE": "percentile over the tokens of the slope of a token's line, 1/σ (1/ρ without centring)",
        "95:5": "95th over 5th percentile of the slopes",
        "error": "largest |y − line| among the elements of the drawn tokens",
    },
    "stats": {
        "95%": "95th percentile of |μ|/σ over tokens",
        "mean's share": "share of a token's Σx² that is due to its mean",
        "without": "change of y if the norm did not centre, Σ(y − RMSNorm(x))²/Σy²",
        "σ PERCENTILE": "percentile over tokens of the divisor σ = 1/rstd, with eps",
        "eps": "share of tokens whose y eps lowers by 1% or more",
        "holds to": "factor by which x can shrink before eps changes y by 1%, for 99% of the tokens",
        "linear": "share of pairs where the fitted tanh is within 5% of its tangent",
        "α": "the module's own; a range, in any column, is the 5th to 95th percentile over channels",
        "slope": "slope of f(αx + s) at x = 0, α·f′(s)",
        "α×std": "α times that standard deviation",
        "saturated": "share of pairs beyond the ends of f, where |f′| stays under 5% of its peak",
        "|weight|": "magnitude of the weight",
        "stuck": "number of channels with all x beyond the same end of f",
        "dead": "number of channels of constant output: x is constant, or α or the weight is zero",
        "kurtosis": "fourth standardized moment of x, 3 for a normal distribution",
        "median": "median of |x|",
        "ratio": "largest |x| over the median",
        ">100×": "number of pairs beyond 100 times the median",
        "massive": "number of massive activations: |x| > 100 and |x| > 1000 × the median",
        "channels": "channels with the largest shares of Σx²",
        "tokens": "positions, within their samples, of the 16 tokens of largest |x|, and how many have each",
        "90% of y²": "share of a token's elements that contain 90% of its Σy², median; 44% if it is normal",
        "cosine": "mean cosine between the y of two of the 16 tokens of largest |x|",
        "leading": "the 4 channels of largest Σx²",
        "of Σx²": "share of each in Σx²",
        "of Σy²": "share of each in Σy²",
        "of Σ(γy)²": "share of each in Σ(γy)², the output before the bias",
        "γ : median": "γ of each over the median |γ| of all channels",
        "R² of NUMBER": "held-out R² of σ² predicted from this number of channels, chosen greedily",
    },
    "check": {
        "max x": "largest |x|, in that channel, and at that position of its sample (token)",
        "max sum": "largest Σx² of a token among the 16 tokens of largest |x|; bound: by the largest σ and |μ|/σ",
        "max output": "largest |γy + β| among the same tokens; bound: by the bound of |y|",
        "overflows": "values beyond the dtype's range: x and output are stored, x² and Σx² intermediate",
        "may overflow": "values whose bound alone is beyond it",
        "sigma": "σ of the median token",
        "step": "distance between two numbers of the dtype at the largest |x|",
        "subnormal": "share of tokens whose mean x² the dtype stores with fewer digits",
        "eps": "of the norm; below other numbers, the relative L2 of its output with these in place of it",
        "worst token": "largest change of a token's output by these eps, or by `--eps`, from the low end of its bin",
        "eps as stored": "eps, rounded to the dtype",
        "tensor": "relative L2 of all x, quantized with one scale",
        "tensor median": "the same of single tokens, median over those drawn",
        "channel median": "likewise, with a scale per channel",
        "token median": "likewise, with a scale per token",
        "without channels": "likewise, with one scale for all other channels",
        "channels": "channels whose largest |x| is at least half of the largest; four at most",
        "tokens": "positions of such x",
    },
    "gradient": {
        "tokens": "number of tokens drawn, of all tokens",
        "share": "share of ‖∂y/∂x‖² on the diagonal, mean over the tokens drawn",
        "least": "smallest such share, among the tokens of largest |x| too",
        "in tail": "share of the diagonal in its row, mean over the 1% of drawn pairs of largest |x|",
        "ceiling": "held-out R² of ∂y_i/∂x_i by the best function of x found",
        "R² CURVE′": "R² of ∂y_i/∂x_i over all pairs, by the curve's derivative",
        "of": "centre, or tail: the 1% of the pairs of largest |x|",
        "1/rstd": "σ, or ρ without centring, which DyT holds constant: median",
        "√C": "root of DyISRU's constant C, in the same unit: median",
        "p84/p16": "ratio of the quantiles 0.84 and 0.16 of the quantity to its left, 1 where it is constant",
        "raw √C": "the same ratio for √(x²(d/y² − 1)), with the token's mean in x",
        "steadier for": "curve whose constant spreads less; alike: the ratios differ by at most 5%",
    },
    "compare": {
        "α ratio": "α over that of capture 1, with its 95% interval; *: the interval excludes 1",
        "slope ratio": "slope over that of capture 1, likewise",
        "held-out R²": "R² on folds that the curve was not fitted to",
        "R² of 1": "R² of capture 1's curve on these pairs",
    },
    "timeline": {
        "α": "of the fitted curve; of a point-wise function its own, the median over channels",
        "massive": "number of channels with massive activations",
    },
    "layers": {
        "f": "curve of a point-wise function in place of a norm, with its α",
        "shape": "sizes of the axes that share one statistic",
        "axis": "axis of the norm's input that numbers the channels",
        "eps": "constant added under the root",
        "affine": "yes if the norm has a weight or a bias",
        "calls": "number of calls in one forward pass",
    },
    "swap": {
        "replaced by": "function in place of the norm",
        "QUALITY": "score of the network's task, such as top-1 accuracy or perplexity",
        "95%": "Wilson's interval of an accuracy",
        "kept": "number of norms that were not replaced",
        "norm put back": "norm kept in addition to those above",
        "swapped": "number of norms replaced",
        "held out": "median over inputs not used for the choice",
        "p90": "90th percentile over the same inputs",
        "calibrated": "median after calibration, on the inputs used for the choice",
    },
    "swap-bench": {
        "cosine": "cosine between swapped and original output, median over inputs",
        "≤ 0.1": "number of norms, least harmful first, that can be swapped before the median L2 exceeds 0.1",
        "top-1": "share of inputs with the same first answer",
        "top-5": "share of inputs with the original's first answer among the swapped network's five",
        "of 5": "share of the original's five answers among the swapped network's five",
        "frame L2": "relative L2 of single frames, median",
        "end L2": "relative L2 of the latents at the end of trajectories, median",
        "end cosine": "cosine of the latents at the end of trajectories, median",
        "not finite": "inputs with a NaN or an infinity in the output, which count as infinitely far",
        "part": "part of the data, such as a timestep",
        "max": "largest relative L2",
        "CURVE": "relative L2 at the network's output with this site alone swapped, median over inputs",
        "what": "the norm alone, or the whole network",
        "variant": "native for the network's own norm, or the function in its place",
        "way": "eager, compile, or fused (by normscope's kernels)",
        "passes": "forward, or forward + backward",
        "verdict": "faster or slower than native if the quartiles of 3 or more times do not overlap; else inconclusive",
        "n": "number of times measured",
        "time": "median time of a call",
        "p25–p75": "first and third quartile of the times",
        "ratio": "time over that of the network's own norm",
    },
    "heal": {
        "after": "stage: start values, calibrated, trained",
        "steps": "number of training steps",
        "PERCENTILE": "percentile of the held-out drift; median: the 50th",
        "closed": "share of the initial median drift that is gone",
        "kept": "yes for the state that was written",
    },
    "simplify": {
        "RMSNorm": "exact if an RMSNorm replaced the norm, removed if nothing did; otherwise the reason",
        "folded": "parameters that moved into the linear layers behind the norm; otherwise the reason",
        "change": "relative L2 of the norm's output in float64, before γ and β moved",
    },
    "curves": {
        "f(u), u = αx + s": "formula",
        "from": "where the curve comes from",
    },
    "models": {
        "model": "name to type",
        "family": "vision, speech, language or diffusion",
        "what it is": "architecture and training data",
        "weights": "library and name of the weights",
    },
    "report": {
        "σ median": "median over tokens of the divisor σ = 1/rstd, with eps",
        "σ 95:5": "95th over 5th percentile of σ",
        "beyond linear": "share of pairs where the fitted tanh is over 5% from its tangent",
        "Σx² in 3": "share of Σx² in the three channels with the largest shares",
        "massive pairs": "number of massive activations",
        "massive channels": "number of channels with massive activations",
        "max |x| : median": "largest |x| over the median |x|",
    },
}


def definitions(table: str) -> dict[str, str]:
    """Return the definitions for a table's headings: its own, and those of terms and of columns that tables share.

    >>> definitions("fit")["tail"]
    'RMSE beyond the 99th percentile of |x|'
    >>> definitions("stats")["site"] == definitions("fit")["site"]
    True
    """
    return {**DEFINITIONS[TERMS], **DEFINITIONS[COMMON], **DEFINITIONS[table]}


# Tables of a command beyond those of its name; capital letters in a heading that stand for a name of the run.
_ALSO = {"swap-bench": ("swap",)}
_NAMES = {
    "CURVE": ".+",
    "QUALITY": ".*(accuracy|perplexity|correlation|error)",
    "PERCENTILE": r"\d+%",
    "NUMBER": r"\d+",
}
_TYPED = str.maketrans({"√": "sqrt", "≤": "<=", "×": "x", "′": "'", "–": "-", "_": "-", " ": "-"})


def headings(command: str) -> list[str]:
    """Return the headings that the tables of a command may have."""
    sections = {COMMON, command, *_ALSO.get(command, ())}
    tables = [entries for table, entries in DEFINITIONS.items() if {table, table.partition(" ")[0]} & sections]
    return list(dict.fromkeys(heading for entries in tables for heading in entries))


def unknown_column(command: str, names: Iterable[str]) -> str | None:
    """Return the first name of no column that a command's tables may have."""
    patterns = [_pattern(heading) for heading in headings(command)]
    return next((name for name in names if not any(re.fullmatch(pattern, typed(name)) for pattern in patterns)), None)


def _pattern(heading: str) -> str:
    pieces = re.split(f"({'|'.join(_NAMES)})", heading)
    return "".join(_NAMES.get(piece) or re.escape(typed(piece)) for piece in pieces)


def typed(heading: str) -> str:
    """Return a heading as any keyboard types it: lower case, hyphens for spaces, Greek letters by name.

    >>> typed("R² 95%"), typed("α"), typed("held-out R²"), typed("|μ|/σ")
    ('r2-95%', 'alpha', 'held-out-r2', '|mu|/sigma')
    """
    letters = unicodedata.normalize("NFKC", heading).casefold()
    named = (unicodedata.name(letter).split()[-1].casefold() if "α" <= letter <= "ω" else letter for letter in letters)
    return "".join(named).translate(_TYPED).replace("-%", "%")
