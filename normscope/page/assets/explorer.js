"use strict";
// The explorer: a fitted curve, moved by hand over a site's own pairs, with R² over all of them.

const SLIDER_STEPS = 1000;
const FACTOR = 30; // each way, that a slider of α or A reaches

// The curve and its function f; `start` and `values` are {amplitude, alpha, shift}.
const explored = { site: null, curve: null, f: null, start: null, values: null };

function explorerView() {
  const { site } = open;
  const nodes = site && site.drawn && site.drawn.nodes;
  const curves = nodes ? site.fits.filter(({ nothing }) => !nothing).map(({ curve }) => curve).filter(functionOf) : [];
  const head = element("div", { class: "site-head" }, [element("h2", { text: "Curve explorer" }), site ? steps() : null]);
  if (!nodes) return [head, warning(`There is nothing to fit${site && site.nothing ? `: ${visible(site.nothing)}` : ""}.`)];
  if (!curves.length) return [head, warning("There is no fit of a curve to explore here.")];
  chooseCurve(site, curves);
  const told = element("p", { class: "note", id: "formula-shown" });
  const outcome = element("p", { class: "outcome", id: "outcome" });
  const moveTo = (values) => {
    explored.values = values;
    told.textContent = formulaText();
    outcome.textContent = outcomeText(site, nodes);
    sliders.forEach((slider) => slider.update());
    Plot.redrawAll();
  };
  const sliders = knobs(moveTo);
  moveTo(explored.values);
  const select = dropdown(asOptions(curves), explored.curve, (curve) => { go({ curve }); render(); }, { id: "curve" });
  const [curve, residual] = explorerFigures(site);
  return [
    head,
    remark(`${siteTitle(site)} · y ≈ A·f(αx + s) over all ${grouped(site.pairs)} pairs, from their binned sums.`),
    element("div", { class: "columns" }, [
      curve,
      element("div", { class: "beside" }, [
        element("section", { class: "knobs" }, [
          element("label", { class: "row" }, [element("span", { text: "Curve" }), select]),
          ...sliders, told, outcome,
          element("p", { class: "tools" }, [button("Back to the fit", () => moveTo(explored.start), { id: "reset" })]),
        ]),
      ]),
      residual,
    ]),
  ];
}

// R² about the mean of y of A·f(αx + s), over all pairs of a site.
function r2Of(nodes, f, amplitude, alpha, shift) {
  const [x, y, weight, scatter] = [nodes.x, nodes.y, nodes.weight, nodes.scatter].map(numbersOf);
  let left = 0;
  for (let place = 0; place < x.length; place += 1) {
    const off = y[place] - amplitude * f(alpha * x[place] + shift);
    left += weight[place] * off * off + scatter[place];
  }
  return 1 - left / nodes.total;
}

// Starts from the fit of the open site, and leaves alone what the reader moved there.
function chooseCurve(site, curves) {
  const curve = [state.curve, explored.curve, curves[0]].find((name) => curves.includes(name));
  if (explored.curve === curve && explored.site === site) return;
  Object.assign(explored, { site, curve, f: functionOf(curve) });
  const { amplitude, alpha, shift } = fitOf(site);
  explored.start = { amplitude, alpha, shift };
  explored.values = explored.start;
}

function fitOf(site) {
  return site.fits.find(({ curve }) => curve === explored.curve);
}

function formulaText() {
  const { amplitude, alpha, shift } = explored.values;
  const s = shift ? ` ${shift < 0 ? "−" : "+"} ${number(Math.abs(shift))}` : "";
  return visible(`y ≈ ${number(amplitude)}·f(${number(alpha)}x${s}), f = ${PAGE.curves[explored.curve].formula}`);
}

function explorerFigures(site) {
  const line = (x, less = null) => {
    const { amplitude, alpha, shift } = explored.values;
    const y = x.map((value, place) => (less ? less[place] : 0) + (less ? -1 : 1) * amplitude * explored.f(alpha * value + shift));
    return { x, y, ...palette.curve(explored.curve), dashes: [], width: 2.6, name: "explored" };
  };
  const x = axisOfSite(site, "asinh").evenly(PAGE.line_points);
  const mean = meanLine(site);
  const curve = figure({
    label: `Explored curve at ${siteTitle(site)}`, size: "tall",
    scene: () => scurveScene(site, { colour: "density", lines: [...curveLines(site, "line", 1.2), line(x)], hovers: false }),
  }, { heading: "Curve over the density", note: "Thin: the fits of this norm. Thick: the curve that you move." });
  const residual = figure({ label: `Residuals of the explored curve at ${siteTitle(site)}`, height: 190, scene: () => residualScene(site, mean.x, [line(mean.x, mean.y)]) },
    { heading: "E[y|x] less the curve" });
  return [curve.whole, residual.whole];
}

function outcomeText(site, nodes) {
  const { amplitude, alpha, shift } = explored.values;
  const { r2, r2_cv: heldOut, r2_ceiling: ceiling } = fitOf(site);
  const parts = [
    `R² ${score(r2Of(nodes, explored.f, amplitude, alpha, shift))}`, `fitted ${score(r2)}`, `held-out ${score(heldOut)}`,
  ];
  if (ceiling !== null) parts.push(`ceiling ${score(ceiling)}`);
  return parts.join(" · ");
}

// A slider and a field for each of A, α and s; A and α move by factors.
function knobs(moved) {
  const { inverse, linear } = PAGE.curves[explored.curve];
  const { amplitude, alpha } = explored.start;
  const set = (name) => (value) => moved({ ...explored.values, [name]: value, ...(inverse && name === "alpha" ? { amplitude: 1 / value } : {}) });
  return [
    inverse ? null : knob("A", "amplitude", amplitude || 1, set("amplitude")),
    linear ? null : knob("α", "alpha", alpha || 1, set("alpha")),
    knob("s", "shift", 4, set("shift"), new Axis(-1, 1)),
  ].filter(Boolean);
}

// `axis` is that of the slider, in times of `unit`.
function knob(sign, name, unit, set, axis = new Axis(1 / FACTOR, FACTOR, { logarithmic: true })) {
  const slider = element("input", { type: "range", id: `slider-${name}`, min: 0, max: SLIDER_STEPS, step: 1, "aria-label": `${sign}, slider` });
  const field = element("input", { type: "number", id: `field-${name}`, step: "any", "aria-label": sign });
  slider.addEventListener("input", () => set(unit * axis.value(slider.value / SLIDER_STEPS)));
  field.addEventListener("change", () => {
    const value = Number(field.value);
    if (field.value !== "" && Number.isFinite(value) && (name !== "alpha" || value > 0)) set(value);
    else update();
  });
  function update() {
    const value = explored.values[name];
    const step = SLIDER_STEPS * axis.share(value / unit);
    slider.value = Number.isFinite(step) ? step : SLIDER_STEPS / 2;
    slider.setAttribute("aria-valuetext", number(value));
    if (document.activeElement !== field) field.value = Number(value.toPrecision(4));
  }
  update();
  const row = element("div", { class: "row" }, [element("span", { class: "sign", text: sign }), slider, field]);
  row.update = update;
  return row;
}
