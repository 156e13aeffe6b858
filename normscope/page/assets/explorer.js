"use strict";
// The explorer: a known curve, or a formula, moved by hand over a site's own pairs, with R² over all of them.

const SLIDER_STEPS = 1000;
const FACTOR = 30; // each way, that a slider of α or A reaches

const explored = { curve: null, formula: "", f: null, values: null, site: null, shifted: false };

function explorerView() {
  const { site } = open;
  const nodes = site && nodesOf(site);
  const head = element("div", { class: "site-head" }, [element("h2", { text: "Curve explorer" }), site ? steps() : null]);
  if (!nodes) return [head, warning(`There is nothing to fit${site && site.nothing ? `: ${visible(site.nothing)}` : ""}.`)];
  chooseCurve(site);
  const shown = explorerShown(site, nodes);
  const others = open.capture.curves.filter((curve) => PAGE.curves[curve].own);
  const names = [...Object.keys(PAGE.curves).filter((name) => !PAGE.curves[name].own), ...others].filter((name) => functionOf(name));
  const select = dropdown(names.map((name) => [name, name]), explored.curve, (curve) => { go({ curve }); render(); }, { id: "curve" });
  return [
    head,
    remark(`${siteTitle(site)} · y ≈ A·f(αx + s) over all ${grouped(site.pairs)} pairs, from their binned sums.`),
    element("div", { class: "columns" }, [
      element("div", { class: "figures" }, [shown.figure.whole, shown.residual.whole]),
      element("div", { class: "beside" }, [
        element("section", { class: "knobs" }, [
          element("label", { class: "row" }, [element("span", { text: "Curve" }), select]),
          element("p", { class: "note", id: "formula-shown", text: explored.formula ? "" : `f(u) = ${PAGE.curves[explored.curve].formula}` }),
          ...shown.knobs, shown.outcome,
          element("p", { class: "tools" }, [
            button("Fit", shown.fit, { id: "fit", title: "Least squares over all pairs" }),
            button("As Python fitted it", shown.reset, { id: "reset", disabled: !fitOf(site) }),
          ]),
        ]),
        formulaSection(shown),
      ]),
    ]),
  ];
}

function chooseCurve(site) {
  const known = (name) => name && functionOf(name);
  const wanted = [state.curve, explored.curve, ...open.capture.curves, "tanh"].find(known);
  if (explored.curve !== wanted || explored.site !== site) explored.values = null;
  if (explored.curve !== wanted) explored.formula = "";
  Object.assign(explored, { curve: wanted, site });
  explored.f = explored.formula ? formula(explored.formula) : functionOf(wanted);
}

function fitOf(site) {
  return explored.formula ? undefined : site.fits.find((fit) => fit.curve === explored.curve && !fit.nothing);
}

// What a search for the optimum is told of the curve.
function formOf() {
  if (explored.formula) return { shifted: explored.shifted };
  const { shifted, inverse, linear } = PAGE.curves[explored.curve];
  return { shifted: shifted || explored.shifted, inverse, linear };
}

function startValues(site, nodes) {
  return parametersOf(fitOf(site) || fitted(nodes, explored.f, formOf()));
}

function parametersOf({ amplitude, alpha, shift }) {
  return { amplitude, alpha, shift };
}

function explorerShown(site, nodes) {
  explored.values = explored.values || startValues(site, nodes);
  const outcome = element("p", { class: "outcome", id: "outcome" });
  const x = ownAxis(site).evenly(PAGE.line_points);
  const colour = () => palette.style.channels[0];
  const line = () => {
    const { amplitude, alpha, shift } = explored.values;
    return { x, y: Float64Array.from(x, (value) => amplitude * explored.f(alpha * value + shift)), colour: colour(), width: 2.6, name: "explored" };
  };
  const shown = { outcome, knobs: [] };
  shown.figure = figure({
    label: `Explored curve at ${siteTitle(site)}`, height: highOf,
    scene: () => scurveScene(site, { colour: "density", lines: [...curveLines(site, "line", 1.2), line()], hovers: false }),
  }, { heading: "Curve over the density", note: "Thin: the fits of this site. Thick: the curve that you move." });
  shown.residual = figure({ label: `Residuals of the explored curve at ${siteTitle(site)}`, height: 190, scene: () => nodesResiduals(site, nodes, colour()) },
    { heading: "Mean of y less the curve", note: "A point a bin of x; its width is the share of all pairs." });
  const redraw = () => {
    outcome.textContent = outcomeText(site, nodes);
    [shown.figure, shown.residual].forEach(({ plot }) => plot.draw());
    shown.knobs.forEach((knob) => knob.update && knob.update());
  };
  shown.knobs = knobs(site, nodes, redraw);
  shown.fit = () => {
    explored.values = parametersOf(fitted(nodes, explored.f, formOf()));
    redraw();
    say(outcome.textContent);
  };
  shown.reset = () => { explored.values = startValues(site, nodes); redraw(); };
  outcome.textContent = outcomeText(site, nodes);
  return shown;
}

function outcomeText(site, nodes) {
  const { amplitude, alpha, shift } = explored.values;
  const r2 = r2Of(nodes, explored.f, amplitude, alpha, shift);
  outcome.r2 = r2;
  const fit = fitOf(site);
  const ceiling = site.fits.length ? site.fits[0].r2_ceiling : null;
  const parts = [`R² ${number(r2, 6)}`];
  if (fit) parts.push(`fitted ${number(fit.r2, 6)}`);
  if (ceiling !== null) parts.push(`ceiling ${number(ceiling, 5)}`);
  return parts.join(" · ");
}

// What the explorer last found, for whoever asks: R² with all its digits.
const outcome = { r2: NaN };

function nodesResiduals(site, nodes, colour) {
  const { amplitude, alpha, shift } = explored.values;
  const off = Float64Array.from(nodes.y, (y, place) => y - amplitude * explored.f(alpha * nodes.x[place] + shift));
  const most = nodes.weight.reduce((one, other) => Math.max(one, other), 0);
  const reach = 1.1 * Math.max(...Array.from(off, Math.abs).filter((size, place) => Number.isFinite(size) && nodes.weight[place] > 1e-4 * most), 1e-9);
  const axis = axisOfSite(site);
  return {
    x: axis, y: new Axis(-reach, reach), xlabel: xLabel(axis), ylabel: "E[y|x] − curve",
    levels: [{ y: 0, colour: palette.style.ink, dashes: "" }],
    paint: [(context, plot) => {
      context.fillStyle = colour;
      for (let place = 0; place < off.length; place += 1) dot(context, plot, nodes.x[place], off[place], 1.5 + 4 * Math.sqrt(nodes.weight[place] / most));
    }],
    hover: { x: nodes.x, y: off, text: (place) => [`x ${number(nodes.x[place])}`, `off by ${number(off[place], 3)}`, `${grouped(Math.round(2 * nodes.weight[place]))} pairs in the bin`] },
  };
}

// A slider and a field for each of A, α and s; A and α move by factors.
function knobs(site, nodes, redraw) {
  const { shifted, inverse, linear } = formOf();
  const [low, high] = site.axis.limits;
  const start = startValues(site, nodes);
  const set = (name) => (value) => {
    explored.values = { ...explored.values, [name]: value };
    if (inverse && name === "alpha") explored.values.amplitude = 1 / value;
    redraw();
  };
  const made = [];
  if (!inverse) made.push(knob("A", "amplitude", start.amplitude || 1, set("amplitude")));
  if (!linear) made.push(knob("α", "alpha", start.alpha || 1, set("alpha")));
  made.push(knob("s", "shift", 0, set("shift"), 4));
  const free = element("input", { type: "checkbox", id: "free-shift", checked: shifted, disabled: !explored.formula && PAGE.curves[explored.curve].shifted, onchange: (event) => { explored.shifted = event.target.checked; } });
  made.push(element("label", { class: "row" }, [free, element("span", { text: "let Fit search s too" })]));
  return made;
}

function knob(sign, name, centre, set, reach = null) {
  const toValue = (step) => (reach ? (2 * step / SLIDER_STEPS - 1) * reach : centre * FACTOR ** (2 * step / SLIDER_STEPS - 1));
  const toStep = (value) => (reach ? ((value / reach + 1) / 2) * SLIDER_STEPS : ((Math.log(value / centre) / Math.log(FACTOR) + 1) / 2) * SLIDER_STEPS);
  const slider = element("input", { type: "range", id: `slider-${name}`, min: 0, max: SLIDER_STEPS, step: 1, "aria-label": `${sign}, slider` });
  const field = element("input", { type: "number", id: `field-${name}`, step: "any", "aria-label": sign });
  slider.addEventListener("input", () => set(toValue(Number(slider.value))));
  field.addEventListener("change", () => {
    const value = Number(field.value);
    if (field.value !== "" && Number.isFinite(value) && (name !== "alpha" || value > 0)) set(value);
    else update();
  });
  function update() {
    const value = explored.values[name];
    const step = toStep(value);
    slider.value = Number.isFinite(step) ? step : SLIDER_STEPS / 2;
    slider.setAttribute("aria-valuetext", number(value));
    if (document.activeElement !== field) field.value = Number(value.toPrecision(8));
  }
  update();
  const row = element("div", { class: "row" }, [element("span", { class: "sign", text: sign }), slider, field]);
  row.update = update;
  return row;
}

function formulaSection(shown) {
  const wrong = element("p", { class: "warning", id: "formula-error", role: "alert", hidden: true });
  const input = element("input", { type: "text", id: "formula", spellcheck: "false", autocomplete: "off", value: explored.formula, placeholder: "x/(1+abs(x)**3)**(1/3)", "aria-label": "Formula of x" });
  const take = (event) => {
    event.preventDefault();
    try {
      const f = formula(input.value.trim());
      if (![-1, 1, 30].every((u) => Number.isFinite(f(u)))) throw new FormulaError("The formula is not finite for all x that occur.");
      Object.assign(explored, { formula: input.value.trim(), f, values: null });
      explored.values = startValues(explored.site, nodesOf(explored.site));
      render();
    } catch (error) {
      if (!(error instanceof FormulaError)) throw error;
      wrong.textContent = visible(error.message);
      wrong.hidden = false;
    }
  };
  return section("h3", "A formula of yours", [
    element("form", { class: "row", onsubmit: take }, [input, element("button", { type: "submit", id: "try", text: "Fit it" })]),
    wrong,
    explored.formula ? element("p", { class: "note" }, [`f(u) = ${visible(explored.formula)} `, button("Drop it", () => { Object.assign(explored, { formula: "", values: null }); render(); }, { class: "link" })]) : null,
    remark(`Of x, numbers, pi, e, + − * / **, brackets, and ${Object.keys(CALLED).join(", ")}. It is parsed here, and never run as code.`),
  ]);
}
