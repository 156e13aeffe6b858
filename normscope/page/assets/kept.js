"use strict";
// Tokens of the inputs that a capture kept: which place of the input each is, its σ, its tail, its straight line.

// The tokens of an input at a site; null where the capture keeps none of it there.
function keptAt(site, input = state.input) {
  return site.drawn.inputs[input] || null;
}

// Numbers of the inputs that are one input in several parts of the data, such as timesteps.
function partsOf(input) {
  const { inputs } = open.capture;
  return Array.from(inputs.keys()).filter((at) => inputs[at].group === inputs[input].group);
}

function inputName(input) {
  const { name, part } = open.capture.inputs[input];
  return shortly([name, part].filter(Boolean).join(" · "));
}

function shortly(text, most = 80) {
  const shown = visible(text);
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
}

function placesIn({ places }) {
  return places.before + places.grid[0] * places.grid[1];
}

function tokenOfPlace({ places: { steps } }, place, other) {
  return other * steps[0] + place * steps[1];
}

// The place and the row of a token.
function placeOfKept({ places: { steps } }, token) {
  const step = Math.max(...steps);
  const [whole, rest] = [Math.floor(token / step), token % step];
  return steps[0] > steps[1] ? { other: whole, place: rest } : { place: whole, other: rest };
}

// The kept token that a drawn one is: {input, token}; null where its sample was not kept.
function keptOfDrawn(site, drawn) {
  if (drawn < 0 || !open.capture.inputs.length || !open.capture.sites.includes(site)) return null;
  const [sample, token, sigma] = ["sample", "position", "sigma"].map((name) => numbersOf(site.drawn.shown[name])[drawn]);
  const input = open.capture.inputs.findIndex((one, at) => {
    const kept = one.sample === sample && keptAt(site, at);
    // Numbers of samples of two data sets may be the same; their tokens are not.
    return kept && Math.abs(numbersOf(kept.sigma)[token] - sigma) <= 1e-3 * sigma;
  });
  return input < 0 ? null : { input, token };
}

// The token that is pinned, where it is a token of this site: of the same input, and of tokens that lie alike.
function pinnedAt(site) {
  const { pin } = state;
  const kept = pin && open.capture.sites.includes(site) ? keptAt(site, pin.input) : null;
  return kept && kept.shape.join("x") === pin.shape ? { ...pin, kept } : null;
}

function placeName(input, kept, place) {
  const { places } = kept;
  const { words, waveform, picture } = open.capture.inputs[input];
  const [, columns] = places.grid;
  if (place < places.before) return places.kind ? `token of no patch${places.before > 1 ? `, ${place + 1} of ${places.before}` : ""}` : "the whole input";
  const at = place - places.before;
  if (places.kind === "words") return `“${shortly(words[at])}”`;
  if (places.kind === "patches") return `patch in row ${Math.floor(at / columns) + 1}, column ${(at % columns) + 1}`;
  const [length, unit] = waveform ? [waveform.length, "samples"] : [picture.size[1], "columns"];
  const [from, to] = [at, at + 1].map((edge) => Math.round((edge * length) / columns));
  return `frame ${at + 1}, ${unit} ${grouped(from)} to ${grouped(to)}`;
}

// What a token of an input is, in words.
function keptText(site, input, kept, token) {
  const { place, other } = placeOfKept(kept, token);
  const { repeats, named } = kept.places;
  const sigma = numbersOf(kept.sigma)[token];
  const where = [placeName(input, kept, place), `token ${token}`, repeats > 1 ? `${named} ${other + 1}` : null];
  if (Number.isNaN(sigma)) return [...where, "left out: padding, or not finite"].filter(Boolean).join(" · ");
  const tail = kept.tail ? `tail share ${percent(numbersOf(kept.tail)[token])} (|x| ≥ ${number(site.drawn.tail_from)})` : null;
  return [...where, `σ ${short(sigma)}`, tail].filter(Boolean).join(" · ");
}

// How a site's tokens of an input are coloured: values, and a scale that is that of all parts of the input.
function heatOf(site, input, kept) {
  const what = state.heat === "tail" && !kept.tail ? "sigma" : state.heat;
  if (what === "none") return null;
  const parts = partsOf(input).map((part) => keptAt(site, part)).filter(Boolean);
  const values = parts.flatMap((part) => Array.from(numbersOf(part[what])));
  const [low, high] = middle(values);
  if (!(low <= high)) return null;
  const scale = what === "tail" ? new Axis(0, high || extent(values)[1]) : new Axis(low, high, { logarithmic: true });
  return { what, values: numbersOf(kept[what]), scale };
}

function heatColour(heat, token) {
  const value = heat ? heat.values[token] : NaN;
  return Number.isNaN(value) ? null : viridis(heat.scale.share(value));
}

// Which place of which input a kept token is.
function keptName(site, { input, token }) {
  const kept = keptAt(site, input);
  const { place } = placeOfKept(kept, token);
  return `${inputName(input)}${place < placesIn(kept) ? `: ${placeName(input, kept, place)}` : ""}`;
}

// The straight line of a kept token, which an asinh axis bends: hollow, or filled where it is pinned.
function keptLines(site, axis, kept, token, { pinned = false, thin = false } = {}) {
  const [offset, sigma] = [numbersOf(kept.offset)[token], numbersOf(kept.sigma)[token]];
  if (!(sigma > 0) || site.drawn.shown.x) return [];  // of no line
  const bound = site.bound ?? Infinity;
  const [bottom, top] = site.drawn.axes.asinh.y.map((y) => offset + sigma * clipped(y, -bound, bound));
  const [low, high] = [Math.max(axis.low, bottom), Math.min(axis.high, top)];
  if (!(low < high)) return [];
  const points = straightLine(axis, offset, sigma, low, high);
  const { ink, background } = palette.style;
  const width = thin ? 2.6 : 5;
  return [
    { ...points, colour: ink, width, halo: false, name: pinned ? "pinned" : "token" },
    { ...points, colour: pinned ? palette.mark : background, width: width / 2, halo: false },
  ];
}

function pinnedLines(site, axis, thin = false) {
  const pinned = pinnedAt(site);
  return pinned ? keptLines(site, axis, pinned.kept, pinned.token, { pinned: true, thin }) : [];
}
