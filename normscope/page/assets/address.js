"use strict";
// What is open, and the address that keeps it, so that a link opens the page as it was sent.

const VIEWS = { overview: "Overview", site: "Site", explorer: "Explorer", swap: "Swap", compare: "Compare" };
const COLOURS = ["density", "token", "channel"];
const SCALES = ["linear", "asinh"];
const MOST_PICKS = 4;
const PICK = /^(token|channel):[0-9a-f]+$/; // a token's key, or a channel's number
const HEATS = [["sigma", "σ"], ["tail", "tail share"], ["none", "input alone"]];

const state = { view: "overview", capture: 0, site: 0, colour: "density", hidden: new Set(), picks: [], scale: "auto", curve: null, input: 0, heat: "sigma", pin: null, theme: null };

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
  if (state.colour !== "density") said.set("colour", state.colour);
  if (state.hidden.size) said.set("hide", [...state.hidden].join(" "));
  if (state.picks.length) said.set("pick", state.picks.join(" "));
  if (state.scale !== "auto") said.set("x", state.scale);
  if (state.curve) said.set("curve", state.curve);
  if (state.input) said.set("input", state.input + 1);
  if (state.heat !== "sigma") said.set("heat", state.heat);
  if (state.theme) said.set("theme", state.theme);
  if (state.pin) said.set("pin", [state.pin.input + 1, state.pin.token, state.pin.shape].join("."));
  return `#${said}`;
}

// Takes from the address what it understands, and leaves the rest as it is where it begins.
function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  const oneOf = (name, known, usual) => (known.includes(said.get(name)) ? said.get(name) : usual);
  state.view = oneOf("view", Object.keys(VIEWS), "overview");
  state.capture = Math.min(Math.max(Number.parseInt(said.get("capture") || "1", 10) - 1, 0), PAGE.captures.length - 1) || 0;
  state.site = Math.max(open.capture.sites.findIndex(({ name }) => name === said.get("site")), 0);
  state.colour = oneOf("colour", COLOURS, "density");
  state.scale = oneOf("x", SCALES, "auto");
  state.hidden = new Set((said.get("hide") || "").split(" ").filter(Boolean));
  state.picks = (said.get("pick") || "").split(" ").filter((pick) => PICK.test(pick)).slice(0, MOST_PICKS);
  state.curve = Object.hasOwn(PAGE.curves, said.get("curve") || "") ? said.get("curve") : null;
  state.input = Math.max(Number.parseInt(said.get("input") || "1", 10) - 1, 0) || 0;
  state.heat = oneOf("heat", HEATS.map(([heat]) => heat), "sigma");
  state.theme = oneOf("theme", Object.keys(PAGE.styles), null);
  state.pin = pinOf(said.get("pin") || "");
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

// Changes what is open, and the address with it, and draws again what is shown.
function go(change) {
  const before = [state.view, state.capture, state.site].join();
  Object.assign(state, change);
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
