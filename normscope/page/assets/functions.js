"use strict";
// The functions f of the built-in curves, as normscope/curves/known.py contains them.

function erf(u) {
  const size = Math.abs(u);
  if (!(size < 6)) return Number.isNaN(u) ? NaN : Math.sign(u);
  // 2/√π · e^(−u²) · Σ 2ⁿ u^(2n+1) / (2n+1)!!, whose terms are all of one sign: no digit is lost.
  let term = size;
  let sum = size;
  for (let n = 1; term > 1e-17 * sum; n += 1) {
    term *= (2 * size * size) / (2 * n + 1);
    sum += term;
  }
  return Math.sign(u) * (2 / Math.sqrt(Math.PI)) * Math.exp(-size * size) * sum;
}

function clipped(u, low, high) {
  return Math.min(Math.max(u, low), high);
}

function odd(size, u) {
  return u < 0 ? -size : size;
}

const FUNCTIONS = {}; // printed here from the table in normscope/curves/known.py

// f of a curve by its name: a built-in one, or a formula that can be read; null of any other.
function functionOf(name) {
  const curve = PAGE.curves[name];
  if (!curve || !curve.readable) return null;
  if (!curve.own) return FUNCTIONS[curve.function];
  try {
    return formula(curve.formula);
  } catch (error) {
    return null;
  }
}
