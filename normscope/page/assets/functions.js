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

const FUNCTIONS = {}; // written here from the table in normscope/curves/known.py

// f of a curve by its name: a built-in one, or a user's between sampled points; null of E[y|x], which differs from site to site.
function functionOf(name) {
  const { function: builtIn, sampled } = PAGE.curves[name];
  return sampled ? interpolated(sampled) : FUNCTIONS[builtIn] ?? null;
}

// f between its values at asinh-spaced u from −reach to reach: a line from one to the next, along asinh(u).
function interpolated({ values, reach }) {
  const f = numbersOf(values);
  const step = (2 * Math.asinh(reach)) / (f.length - 1);
  return (u) => {
    const at = (Math.asinh(u) + Math.asinh(reach)) / step;
    const left = clipped(Math.floor(at), 0, f.length - 2);
    return f[left] + (at - left) * (f[left + 1] - f[left]);
  };
}
