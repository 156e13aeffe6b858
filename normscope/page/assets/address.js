"use strict";
// What is open, and the address that keeps it, so that a link opens the page as it was sent.

const VIEWS = { overview: "Overview", site: "Site", explorer: "Explorer" };
if (PAGE.captures.some(({ check }) => check.length)) VIEWS.check = "Check";
if (PAGE.swaps.drift.length || PAGE.swaps.speed.length) VIEWS.swap = "Swap";
if (PAGE.training) VIEWS.training = "Training";
if (PAGE.captures.length > 1) VIEWS.compare = "Compare";
const COLOURS = ["density", "token", "channel"];
const SCALES = ["linear", "asinh"];
const MOST_PICKS = 4;
const PICK = /^(token|channel):[0-9a-f]+$/; // a token's key, or a channel's number
const HEATS = [["sigma", "σ"], ["tail", "tail share"], ["none", "input alone"]];

const state = { view: "overview", capture: 0, site: 0 };

const asIs = (value) => value ?? "";
const oneOf = (names, usual) => (text) => (names.includes(text) ? text : usual);
const wordsOf = (text) => text.split(" ").filter(Boolean);
const placeOf = (text) => Math.max(Number.parseInt(text || "1", 10) - 1, 0) || 0;

// The rest of the state: its name in the address, its field, the text of a value, and the value of a text, "" for none.
const KEPT = [
  ["colour", "colour", asIs, oneOf(COLOURS, "density")],
  ["hide", "hidden", (hidden) => [...hidden].join(" "), (text) => new Set(wordsOf(text))],
  ["pick", "picks", (picks) => picks.join(" "), (text) => wordsOf(text).filter((pick) => PICK.test(pick)).slice(0, MOST_PICKS)],
  ["x", "scale", asIs, oneOf(SCALES, "linear")],
  ["beside", "beside", besideText, besideOf],
  ["curve", "curve", asIs, oneOf(Object.keys(PAGE.curves), null)],
  ["input", "input", (input) => String(input + 1), placeOf],
  ["heat", "heat", asIs, oneOf(HEATS.map(([heat]) => heat), "sigma")],
  ["pin", "pin", (pin) => (pin ? [pin.input + 1, pin.token, pin.shape].join(".") : ""), pinOf],
  ["theme", "theme", asIs, oneOf(Object.keys(PAGE.styles), null)],
];

const open = {
  get capture() {
    return PAGE.captures[state.capture];
  },
  get site() {
    return this.capture.sites[state.site];
  },
};

function asAddress() {
  const said = new URLSearchParams();
  said.set("view", state.view);
  if (PAGE.captures.length > 1) said.set("capture", state.capture + 1);
  said.set("site", open.capture.sites.length ? open.site.name : "");
  for (const [name, field, write, read] of KEPT) {
    const text = write(state[field]);
    if (text !== write(read(""))) said.set(name, text);
  }
  return `#${said}`;
}

// Takes from the address what it understands, and leaves the rest as it is where it begins.
function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  state.view = oneOf(Object.keys(VIEWS), "overview")(said.get("view"));
  state.capture = Math.min(placeOf(said.get("capture")), PAGE.captures.length - 1);
  state.site = Math.max(open.capture.sites.findIndex(({ name }) => name === said.get("site")), 0);
  for (const [name, field, , read] of KEPT) state[field] = read(said.get(name) || "");
  keepToInputs();
}

// Another capture may hold fewer inputs.
function keepToInputs() {
  const { inputs } = open.capture;
  state.input = Math.min(state.input, Math.max(inputs.length - 1, 0));
  if (state.pin && state.pin.input >= inputs.length) state.pin = null;
}

// A pin is a token of an input, and how the tokens of its norm lie: {input, token, shape}.
function pinOf(text) {
  const [, input, token, shape] = /^(\d{1,9})\.(\d{1,9})\.(\d{1,9}(?:x\d{1,9})*)$/.exec(text) || [];
  const last = (shape || "").split("x").reduce((count, size) => count * Number(size), 1) - 1;
  return shape && Number(input) > 0 && Number(token) <= last ? { input: Number(input) - 1, token: Number(token), shape } : null;
}

// Sites that the reader compares, by the number of their capture, in place of the counterparts of the open site.
function besideText(beside) {
  return Object.entries(beside).map(([capture, site]) => `${Number(capture) + 1}.${site + 1}`).join(" ");
}

function besideOf(text) {
  const pairs = wordsOf(text).filter((pair) => /^\d+\.\d+$/.test(pair)).map((pair) => pair.split(".").map(placeOf));
  return Object.fromEntries(pairs.filter(([capture, site]) => PAGE.captures[capture] && PAGE.captures[capture].sites[site]));
}

// Changes what is open, and the address with it, and draws again what is shown.
function go(change) {
  const before = [state.view, state.capture, state.site].join();
  Object.assign(state, "site" in change || "capture" in change ? { beside: {} } : {}, change);
  keepToInputs();
  const moved = before !== [state.view, state.capture, state.site].join();
  try {
    history[moved ? "pushState" : "replaceState"](null, "", asAddress());
  } catch (error) {
    // Within a notebook's frame there is no address to keep.
  }
  if (moved) render();
  else Plot.redrawAll();
}
