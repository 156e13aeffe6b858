"use strict";
// The functions f of the built-in curves, as normscope/fits/curves/functions.py has them.

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

function sigmoid(u) {
  return Math.exp(Math.min(u, 0)) / (1 + Math.exp(-Math.abs(u)));
}

const FUNCTIONS = {
  tanh: Math.tanh,
  isru: (u) => clipped(u, -1e9, 1e9) / Math.sqrt(1 + clipped(u, -1e9, 1e9) ** 2),
  erf,
  hardtanh: (u) => clipped(u, -1, 1),
  linear: (u) => u,
  softcap: Math.tanh,
  sigmoid,
  arctan: (u) => (2 / Math.PI) * Math.atan(u),
  satursin: (u) => Math.sin(clipped(u, -Math.PI / 2, Math.PI / 2)),
  expsign: (u) => odd(-Math.expm1(-Math.abs(u)), u),
  softsign: (u) => u / (1 + Math.abs(u)),
  relsign: (u) => u / (1 + Math.hypot(u, 1)),
  cubsign: (u) => clipped(u, -1e6, 1e6) ** 3 / (1 + Math.abs(clipped(u, -1e6, 1e6) ** 3)),
  exproot: (u) => odd(-Math.expm1(-Math.sqrt(Math.abs(u))), u),
  saturlog: (u) => odd(Math.log1p(Math.abs(u)) / (1 + Math.log1p(Math.abs(u))), u),
  logquad_clip: (u) => odd(Math.min(Math.log1p(u * u), 1), u),
  logsign_clip: (u) => odd(Math.min(Math.log1p(Math.abs(u)), 1), u),
  power23_clip: (u) => odd(Math.min(Math.abs(u), 1) ** (2 / 3), u),
};

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
