"use strict";
// Least squares of y ≈ A·f(αx + s) on a site's weighted points: the error, and the A, α and s where it is least.

const STEPS_A_DECADE = 12;
const STEEPEST = 1e3;
const STRAIGHTEST = 0.02;
const CENTRES = [0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98];

function nodesOf(site) {
  const nodes = site.drawn && site.drawn.nodes;
  return nodes && {
    x: numbersOf(nodes.x), y: numbersOf(nodes.y), weight: numbersOf(nodes.weight), scatter: numbersOf(nodes.scatter),
    total: nodes.total,
  };
}

// R² about the mean of y of A·f(αx + s), over all pairs of a site.
function r2Of(nodes, f, amplitude, alpha, shift) {
  let left = 0;
  for (let place = 0; place < nodes.x.length; place += 1) {
    const off = nodes.y[place] - amplitude * f(alpha * nodes.x[place] + shift);
    left += nodes.weight[place] * off * off + nodes.scatter[place];
  }
  return 1 - left / nodes.total;
}

// The best A for an α and an s, and Σ w (y − A·f)² with it at the points, whose scatter no fit changes.
function projected(nodes, f, alpha, shift, inverse) {
  let products = 0;
  let squares = 0;
  let every = 0;
  for (let place = 0; place < nodes.x.length; place += 1) {
    const value = f(alpha * nodes.x[place] + shift);
    products += nodes.weight[place] * value * nodes.y[place];
    squares += nodes.weight[place] * value * value;
    every += nodes.weight[place] * nodes.y[place] * nodes.y[place];
  }
  const amplitude = inverse ? 1 / alpha : squares > 0 ? products / squares : 0;
  const error = every - amplitude * (2 * products - amplitude * squares);
  return { amplitude, error: Number.isFinite(error) ? error : Infinity };
}

// A, α, s and R² of least squares; s is searched where `shifted`, and A is 1/α of a curve whose amplitude is that. A line
// has α = 1.
function fitted(nodes, f, { shifted = false, inverse = false, linear = false } = {}) {
  const axes = [...(linear ? [] : [0]), ...(shifted ? [1] : [])];
  const error = ([logAlpha, shift]) => projected(nodes, f, Math.exp(logAlpha), shift, inverse).error;
  const byError = (one, other) => one.error - other.error;
  const begins = (linear ? [[0, 0]] : starts(nodes, shifted)).map((theta) => ({ theta, error: error(theta) })).sort(byError);
  const [end] = apart(begins, 3).map((begin) => descended(error, begin, axes)).sort(byError);
  return solution(nodes, f, end.theta, inverse);
}

function solution(nodes, f, [logAlpha, shift], inverse) {
  const alpha = Math.exp(logAlpha);
  const { amplitude } = projected(nodes, f, alpha, shift, inverse);
  return { amplitude, alpha, shift, r2: r2Of(nodes, f, amplitude, alpha, shift) };
}

// A grid of log α, from where curves are a line over all x to where they are a step, and of centres.
function starts(nodes, shifted) {
  const order = Array.from(nodes.x.keys()).sort((one, other) => nodes.x[one] - nodes.x[other]);
  const sizes = Array.from(nodes.x, Math.abs).sort((one, other) => one - other);
  const reach = sizes.at(-1);
  const middle = sizes[Math.floor(sizes.length / 2)] || reach;
  const low = Math.log(STRAIGHTEST / reach);
  const high = Math.max(Math.log(STEEPEST / middle), low + Math.log(STEEPEST));
  const number = Math.ceil(((high - low) / Math.LN10) * STEPS_A_DECADE);
  const grid = [];
  for (let step = 0; step <= number; step += 1) {
    const logAlpha = low + ((high - low) * step) / number;
    const centres = shifted ? CENTRES.map((share) => (share ? quantile(nodes, order, share) : 0)) : [0];
    for (const centre of centres) grid.push([logAlpha, -Math.exp(logAlpha) * centre || 0]);
  }
  return grid;
}

function quantile(nodes, order, share) {
  const all = nodes.weight.reduce((sum, weight) => sum + weight, 0);
  let below = 0;
  for (const place of order) {
    below += nodes.weight[place];
    if (below >= share * all) return nodes.x[place];
  }
  return nodes.x[order.at(-1)];
}

// The best starts that do not lie beside a better one.
function apart(sorted, most) {
  const kept = [];
  for (const start of sorted) {
    const near = kept.some(({ theta }) => Math.abs(theta[0] - start.theta[0]) < 0.5 && Math.abs(theta[1] - start.theta[1]) < 0.5);
    if (!near && kept.length < most) kept.push(start);
  }
  return kept;
}

// Hooke's and Jeeves's search along some axes: steps that lead down, then one on in the same direction; finer steps
// where none leads down.
function descended(error, start, axes) {
  const at = (theta) => ({ theta, error: error(theta) });
  const beside = (from, step) => {
    let best = from;
    for (const axis of axes) {
      const [up, down] = [step, -step].map((by) => at(best.theta.map((value, place) => value + (place === axis ? by : 0))));
      for (const next of [up, down]) if (next.error < best.error) best = next;
    }
    return best;
  };
  let here = start;
  for (let [step, count] = [0.2, 0]; step > 1e-9 && count < 2000; count += 1) {
    const next = beside(here, step);
    if (next === here) step /= 3;
    else {
      const ahead = beside(at(next.theta.map((value, place) => 2 * value - here.theta[place])), step);
      here = ahead.error < next.error ? ahead : next;
    }
  }
  return here;
}
