"use strict";
// What the page holds: one JSON document, whose arrays are read when they are first needed.

const PAGE = JSON.parse(document.getElementById("data").textContent);
palette.styles = PAGE.styles;
// What a site's figures need is read when the site is first drawn; null of a site of nothing.
PAGE.captures.forEach(({ sites }, capture) => sites.forEach((site, place) => {
  let drawn;
  const read = () => JSON.parse(document.getElementById(`drawn-${capture}-${place}`).textContent);
  Object.defineProperty(site, "drawn", { get: () => (drawn ??= read()) });
}));

// A function whose results are kept as long as their arguments; `key` tells several results of one argument apart.
function cached(made, key = () => "") {
  const kept = new WeakMap();
  return (argument, ...more) => {
    if (!kept.has(argument)) kept.set(argument, {});
    const results = kept.get(argument);
    return (results[key(...more)] ??= made(argument, ...more));
  };
}

const KINDS = { f8: Float64Array, f4: Float32Array, u1: Uint8Array, i2: Int16Array, i4: Int32Array };

// The numbers of a packed array; integers with a scale are floats.
const numbersOf = cached(({ kind, bytes, scale }) => {
  const text = atob(bytes);
  const parts = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) parts[place] = text.charCodeAt(place);
  const numbers = new KINDS[kind](parts.buffer);
  return scale ? new Float32Array(numbers).map((value) => scale * value) : numbers;
});

// The smallest and the largest of some numbers, NaN left out.
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) if (!Number.isNaN(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

// The 5th and the 95th percentile of some numbers, at least one number from either end: ends of a range of colours.
function middle(values) {
  const sorted = Float64Array.from(values).filter((value) => !Number.isNaN(value)).sort();
  const aside = Math.min(Math.ceil(0.05 * (sorted.length - 1)), Math.floor((sorted.length - 1) / 2));
  return [sorted[aside], sorted.at(-1 - aside)];
}

// Signs that would steer a reader or turn letters are written out, as in the package's tables.
const STEERING = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu;

function visible(text) {
  return String(text).replace(STEERING, writtenOut);
}

function writtenOut(sign) {
  const code = sign.charCodeAt(0);
  const short = { 9: "\\t", 10: "\\n", 13: "\\r" }[code];
  return short || (code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`);
}

// A number as the package's tables write it; an en dash where there is none.
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const rounded = Number(value.toPrecision(digits));
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) return rounded.toExponential().replace("-", "−");
  return String(Number.isInteger(value) ? value : rounded).replace("-", "−");
}

// An R², with as many decimals in every row of a table.
function score(value, decimals = 4) {
  return value === null || Number.isNaN(value) ? "–" : value.toFixed(decimals).replace("-", "−");
}

function short(value) {
  return number(value, 3);
}

function percent(share, digits = 1) {
  if (share === null || share === undefined) return "–";
  return `${share > 0 && share < 0.001 ? Number((100 * share).toPrecision(2)) : (100 * share).toFixed(digits)}%`;
}

function grouped(count) {
  return count === null || count === undefined ? "–" : String(count).replace(/\B(?=(\d{3})+$)/g, ",");
}

function counted(count, noun) {
  return `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
}

// The kind of a site: its short name with * for the parts that are numbers.
function kindOfSite({ short }) {
  return short.split(".").map((part) => (/^\d+$/.test(part) ? "*" : part)).join(".");
}

function captureName(capture) {
  return visible([capture.about.model, capture.about.part].filter(Boolean).join(" "));
}

// Of several captures its number too: two may be of one model.
function captureTitle(capture) {
  return PAGE.captures.length > 1 ? `${PAGE.captures.indexOf(capture) + 1} ${captureName(capture)}` : captureName(capture);
}

// The drawn pairs of a site: x, y, the number of the token and of the channel of each; −1 where it is not known.
const pointsOf = cached(({ channels, drawn: { shown, by_channel: single } }) => {
  const [y, offset, sigma] = [shown.y, shown.offset, shown.sigma].map(numbersOf);
  const token = Int32Array.from(y, (_, place) => Math.floor(place / shown.width));
  const channel = Int32Array.from(y, (_, place) => (channels === null ? -1 : place % shown.width));
  const x = shown.x ? numbersOf(shown.x) : y.map((value, place) => offset[token[place]] + sigma[token[place]] * value);
  if (!single.x) return { x, y, token, channel };
  const joined = (first, second) => first.constructor.from([...first, ...numbersOf(second)]);
  const known = { x: joined(x, single.x), y: joined(y, single.y), channel: joined(channel, single.channel) };
  return { ...known, token: known.x.map((_, place) => token[place] ?? -1) };
});
