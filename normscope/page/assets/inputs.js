"use strict";
// Inputs of a site: choose one, see σ or the tail of its tokens where they are, point at one, pin one.

let chosenOther = 0; // head, or call of the norm, whose tokens are shown

// The inputs of a site beside its S-curve, `plot`; null where the capture kept none.
function inputsSection(site, plot) {
  if (!open.capture.inputs.length) return null;
  const whole = element("section", { class: "inputs", "aria-labelledby": "inputs-title" });
  const section = { whole, site, plot, map: null, token: -1 };
  plot.pointed = (found) => pointedAt(section, found);
  section.fill = () => fillInputs(section);
  const pinned = pinnedAt(site);
  if (pinned && pinned.input === state.input) chosenOther = placeOfKept(pinned.kept, pinned.token).other;
  section.fill();
  return whole;
}

function fillInputs(section) {
  const { whole, site } = section;
  const kept = keptAt(site);
  const repeats = kept ? kept.places.repeats : 1;
  const { note } = open.capture.inputs[state.input];
  const said = kept ? kept.places.said : "the tokens of this norm are groups of channels, and no places of the input";
  chosenOther = clipped(chosenOther, 0, repeats - 1);
  section.map = new InputMap(site, state.input, kept, {
    other: chosenOther, rings: () => ringsOf(section),
    told: (place) => pointAt(section, place), chosen: (place) => pinAt(section, tokenOfPlace(kept, place, chosenOther)),
  });
  section.said = element("p", { class: "said", id: "place-said", "aria-live": "polite" });
  section.pinned = element("span");
  refill(whole, [
    element("h3", { id: "inputs-title", text: "Inputs" }),
    element("div", { class: "controls" }, [chooseInput(section), choosePart(section), chooseHeat(section, kept), repeats > 1 ? chooseOther(section, kept) : null]),
    section.map.host, section.said,
    element("p", { class: "picks" }, [section.pinned]),
    heatKey(site, kept), remark(`${inputName(state.input)}: ${said}${note ? `; picture ${visible(note)}` : ""}`),
  ]);
  if (whole.isConnected) section.map.draw();
  markInputs(section, -1);
}

function chooseInput(section) {
  const { inputs } = open.capture;
  const first = Array.from(inputs.keys()).filter((at) => partsOf(at)[0] === at);
  const text = (at) => shortly(inputs[at].name);
  if (first.length < 2) return element("span", { class: "name", text: text(first[0]) });
  return dropdown(first.map((at) => [at, text(at)]), partsOf(state.input)[0], (chosen) => {
    const parts = partsOf(Number(chosen));
    const { part } = inputs[state.input];
    go({ input: parts.find((at) => inputs[at].part === part) ?? parts[0] });
    section.fill();
  }, { id: "input", "aria-label": "Input" });
}

// A slider through the parts of the data, such as timesteps; what is pinned goes with it.
function choosePart(section) {
  const parts = partsOf(state.input);
  if (parts.length < 2) return null;
  const named = (at) => shortly(open.capture.inputs[at].part, 40);
  const shown = element("output", { class: "part", for: "part", text: named(state.input) });
  const slider = element("input", { type: "range", id: "part", min: 0, max: parts.length - 1, step: 1, value: parts.indexOf(state.input), "aria-label": "Part of the data", "aria-valuetext": named(state.input) });
  slider.addEventListener("input", () => {
    const input = parts[Number(slider.value)];
    const goes = state.pin && parts.includes(state.pin.input);
    go({ input, pin: goes ? { ...state.pin, input } : state.pin });
    section.fill();
  });
  return element("label", { class: "row" }, [slider, shown]);
}

function chooseHeat(section, kept) {
  if (!kept || !placesIn(kept)) return null;
  const options = HEATS.filter(([heat]) => heat !== "tail" || kept.tail);
  const chosen = options.some(([heat]) => heat === state.heat) ? state.heat : "sigma";
  return choice("Show", options, chosen, (heat) => { go({ heat }); section.fill(); });
}

function chooseOther(section, { places: { repeats, named } }) {
  const options = Array.from({ length: repeats }, (_, at) => [at, `${named} ${at + 1}`]);
  return dropdown(options, chosenOther, (other) => { chosenOther = Number(other); section.fill(); }, { id: "other", "aria-label": named });
}

// What the colours stand for, in numbers.
function heatKey(site, kept) {
  const heat = kept && placesIn(kept) ? heatOf(site, state.input, kept) : null;
  if (!heat) return element("div");
  const alike = partsOf(state.input).length > 1 ? ", on one scale for all parts of the data" : "";
  const { low: least, high: most } = heat.scale;
  const [low, high, what] = heat.what === "sigma" ? [`≤ ${short(least)}`, `≥ ${short(most)}`, `σ of each token, by factors${alike}`]
    : [percent(0, 0), `≥ ${percent(most)}`, `share of each token's elements with |x| ≥ ${number(site.drawn.tail_from)}, beyond the linear range of this site's tanh${alike}`];
  return element("div", { class: "note", id: "heat-key" }, [
    element("div", { class: "group" }, ramp(low, VIRIDIS, high)),
    element("div", { text: what })]);
}

// Shows the token of a place: in words, by a ring, and as a line on the S-curve. −1: no place.
function pointAt(section, place) {
  const { site, plot, map } = section;
  const token = place < 0 ? -1 : map.tokenOf(place);
  plot.trace(token < 0 ? [] : keptLines(site, axisOfSite(site), map.kept, token));
  markInputs(section, token);
}

// Rings: what is pointed at, what is pinned, and the picked tokens in their colours.
function ringsOf({ site, map, token }) {
  const pinned = pinnedAt(site);
  const rings = [];
  const add = (kept, at, colour) => {
    const { place, other } = placeOfKept(kept, at);
    if (placesIn(kept) > place && other === chosenOther) rings.push({ place, colour });
  };
  if (token >= 0) add(map.kept, token, palette.style.ink);
  if (pinned && pinned.input === state.input) add(pinned.kept, pinned.token, palette.mark);
  state.picks.forEach((pick, rank) => {
    const [kind, key] = pick.split(":");
    const drawn = kind === "token" ? keptOfDrawn(site, placeOfToken(site, key)) : null;
    if (drawn && drawn.input === state.input) add(map.kept, drawn.token, palette.style.channels[rank]);
  });
  return rings;
}

// Puts a ring around the place of a token, and writes what the token is; −1: no token.
function markInputs(section, token) {
  const { site, map, said, pinned } = section;
  section.token = token;
  map.ring();
  const hint = map.kept && placesIn(map.kept) ? "Point at a place to see its token; click to pin it." : "";
  said.textContent = token < 0 ? hint : keptText(site, state.input, map.kept, token);
  pinned.replaceChildren(...(state.pin ? [pinChip(section)] : []));
}

function pinChip(section) {
  const { pin } = state;
  const pinned = pinnedAt(section.site);
  const text = pinned ? `pinned: ${inputName(pin.input)} · ${keptText(section.site, pin.input, pinned.kept, pin.token)}` : `pinned: token ${pin.token} of ${pin.shape.replaceAll("x", " × ")}, which this norm does not have`;
  return chip(palette.mark, text, () => { go({ pin: null }); markInputs(section, -1); }, { id: "unpin", "aria-label": `Unpin: ${text}` });
}

// Pins a token of the input that is shown; the one that is pinned is let go.
function pinAt(section, token) {
  const { map } = section;
  const pin = { input: state.input, token, shape: map.kept.shape.join("x") };
  const same = state.pin && Object.keys(pin).every((name) => pin[name] === state.pin[name]);
  go({ pin: same ? null : pin });
  markInputs(section, -1);
  say(same ? "Unpinned" : "Pinned");
}

// A pair of the S-curve is pointed at: the place of its token gets a ring.
function pointedAt(section, found) {
  const kept = found < 0 ? null : keptOfDrawn(section.site, pointsOf(section.site).token[found]);
  markInputs(section, kept && kept.input === state.input ? kept.token : -1);
}
