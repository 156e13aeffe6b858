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

// A, α, s and R² of least squares; s is searched where `shifted`, and A is 1/α of a curve whose amplitude is that.
function fitted(nodes, f, { shifted = false, inverse = false, linear = false } = {}) {
  if (linear) return solution(nodes, f, [0, 0], inverse);
  const error = ([logAlpha, shift]) => projected(nodes, f, Math.exp(logAlpha), shift, inverse).error;
  const start = starts(nodes, shifted).map((theta) => ({ theta, error: error(theta) }));
  start.sort((one, other) => one.error - other.error);
  const widths = (width) => (shifted ? [width, width] : [width]);
  // The second search starts where the first one ended.
  const ends = apart(start, 3).map(({ theta }) => simplex(error, simplex(error, theta, widths(0.2)).theta, widths(1e-3)));
  ends.sort((one, other) => one.error - other.error);
  return solution(nodes, f, ends[0].theta, inverse);
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

// Nelder's and Mead's simplex.
function simplex(error, start, widths) {
  const at = (theta) => ({ theta, error: error(theta) });
  let corners = [at(start), ...widths.map((width, axis) => at(start.map((value, place) => value + (place === axis ? width : 0))))];
  for (let step = 0; step < 400; step += 1) {
    corners.sort((one, other) => one.error - other.error);
    const worst = corners.at(-1);
    const size = Math.max(...worst.theta.map((value, place) => Math.abs(value - corners[0].theta[place])));
    if (size < 1e-10) break;
    const others = corners.slice(0, -1);
    const centre = start.map((_, place) => others.reduce((sum, { theta }) => sum + theta[place], 0) / others.length);
    const along = (factor) => at(centre.map((value, place) => value + factor * (worst.theta[place] - value)));
    const mirrored = along(-1);
    let taken = mirrored;
    if (mirrored.error < corners[0].error) {
      const farther = along(-2);
      if (farther.error < mirrored.error) taken = farther;
    } else if (mirrored.error >= corners.at(-2).error) {
      taken = along(mirrored.error < worst.error ? -0.5 : 0.5);
    }
    if (taken.error < worst.error) corners = [...others, taken];
    else corners = [corners[0], ...corners.slice(1).map(({ theta }) => at(theta.map((value, place) => (value + corners[0].theta[place]) / 2)))];
  }
  corners.sort((one, other) => one.error - other.error);
  return corners[0];
}
