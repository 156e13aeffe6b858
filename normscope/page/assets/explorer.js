"use strict";
// The explorer: a known curve, or a formula, moved by hand over a site's own pairs, with R² over all of them.

const SLIDER_STEPS = 1000;
const FACTOR = 30; // each way, that a slider of α or A reaches

// The curve, or a formula in its place; `start` and `values` are {amplitude, alpha, shift}; `shifted` once the reader chose.
const explored = { site: null, curve: null, formula: "", f: null, start: null, values: null, shifted: null };

function explorerView() {
  const { site } = open;
  const nodes = site && nodesOf(site);
  const head = element("div", { class: "site-head" }, [element("h2", { text: "Curve explorer" }), site ? steps() : null]);
  if (!nodes) return [head, warning(`There is nothing to fit${site && site.nothing ? `: ${visible(site.nothing)}` : ""}.`)];
  chooseCurve(site, nodes);
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
  const fit = () => {
    moveTo(fitted(nodes, explored.f, formOf(site)));
    say(`${told.textContent}: ${outcome.textContent}`);
  };
  const own = open.capture.curves.filter((curve) => PAGE.curves[curve].own);
  const names = [...Object.keys(PAGE.curves).filter((name) => !PAGE.curves[name].own), ...own].filter(functionOf);
  const select = dropdown(asOptions(names), explored.curve, (curve) => { go({ curve }); render(); }, { id: "curve" });
  const [curve, residual] = explorerFigures(site);
  return [
    head,
    remark(`${siteTitle(site)} · y ≈ A·f(αx + s) over all ${grouped(site.pairs)} pairs, from their binned sums.`),
    element("div", { class: "columns" }, [
      curve,
      element("div", { class: "beside" }, [
        element("section", { class: "knobs" }, [
          element("label", { class: "row" }, [element("span", { text: "Curve" }), select]),
          ...sliders, freeShift(site), told, outcome,
          element("p", { class: "tools" }, [
            button("Fit", fit, { id: "fit", title: "Least squares over all pairs" }),
            button("As Python fitted it", () => moveTo(explored.start), { id: "reset", disabled: !fitOf(site) }),
          ]),
        ]),
        formulaSection(),
      ]),
      residual,
    ]),
  ];
}

// Starts from the fit of the open site, or fits what has none.
function chooseCurve(site, nodes) {
  const curve = [state.curve, explored.curve, ...open.capture.curves, "tanh"].find((name) => name && functionOf(name));
  if (explored.curve !== curve) explored.formula = "";
  if (explored.values && explored.curve === curve && explored.site === site) return;
  Object.assign(explored, { site, curve, f: explored.formula ? formula(explored.formula) : functionOf(curve) });
  const { amplitude, alpha, shift } = fitOf(site) || fitted(nodes, explored.f, formOf(site));
  explored.start = { amplitude, alpha, shift };
  explored.values = explored.start;
}

function fitOf(site) {
  return explored.formula ? undefined : site.fits.find((fit) => fit.curve === explored.curve && !fit.nothing);
}

// The form to fit: with a shift where the curve can have one and the site's fits do, unless the reader chose.
function formOf(site) {
  const { shifted, inverse, linear } = explored.formula ? { shifted: true } : PAGE.curves[explored.curve];
  const usual = site.fits.some(({ form }) => form.split(/[,;] /).includes("s"));
  return { shifted: shifted && (explored.shifted ?? usual), inverse, linear };
}

function formulaText() {
  const { amplitude, alpha, shift } = explored.values;
  const s = shift ? ` ${shift < 0 ? "−" : "+"} ${number(Math.abs(shift))}` : "";
  return visible(`y ≈ ${number(amplitude)}·f(${number(alpha)}x${s}), f = ${explored.formula || PAGE.curves[explored.curve].formula}`);
}

function explorerFigures(site) {
  const line = (x, less = null) => {
    const { amplitude, alpha, shift } = explored.values;
    const y = x.map((value, place) => (less ? less[place] : 0) + (less ? -1 : 1) * amplitude * explored.f(alpha * value + shift));
    return { x, y, colour: palette.style.channels[0], width: 2.6, name: "explored" };
  };
  const x = axisOfSite(site, "asinh").evenly(PAGE.line_points);
  const mean = meanLine(site);
  const curve = figure({
    label: `Explored curve at ${siteTitle(site)}`, size: "tall",
    scene: () => scurveScene(site, { colour: "density", lines: [...curveLines(site, "line", 1.2), line(x)], hovers: false }),
  }, { heading: "Curve over the density", note: "Thin: the fits of this site. Thick: the curve that you move." });
  const residual = figure({ label: `Residuals of the explored curve at ${siteTitle(site)}`, height: 190, scene: () => residualScene(site, mean.x, [line(mean.x, mean.y)]) },
    { heading: "E[y|x] less the curve" });
  return [curve.whole, residual.whole];
}

function outcomeText(site, nodes) {
  const { amplitude, alpha, shift } = explored.values;
  const fit = fitOf(site);
  const ceiling = site.fits.length ? site.fits[0].r2_ceiling : null;
  const parts = [`R² ${number(r2Of(nodes, explored.f, amplitude, alpha, shift), 6)}`];
  if (fit) parts.push(`fitted ${number(fit.r2, 6)}`, `held-out ${number(fit.r2_cv, 5)}`);
  if (ceiling !== null) parts.push(`ceiling ${number(ceiling, 5)}`);
  return parts.join(" · ");
}

// A slider and a field for each of A, α and s; A and α move by factors.
function knobs(moved) {
  const { inverse, linear } = formOf(open.site);
  const { amplitude, alpha } = explored.start;
  const set = (name) => (value) => moved({ ...explored.values, [name]: value, ...(inverse && name === "alpha" ? { amplitude: 1 / value } : {}) });
  return [
    inverse ? null : knob("A", "amplitude", amplitude || 1, set("amplitude")),
    linear ? null : knob("α", "alpha", alpha || 1, set("alpha")),
    knob("s", "shift", 4, set("shift"), new Axis(-1, 1)),
  ].filter(Boolean);
}

function freeShift(site) {
  const free = element("input", {
    type: "checkbox", id: "free-shift", checked: formOf(site).shifted, disabled: !explored.formula && !PAGE.curves[explored.curve].shifted,
    onchange: (event) => { explored.shifted = event.target.checked; },
  });
  return element("label", { class: "row" }, [free, element("span", { text: "Fit s too" })]);
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
    if (document.activeElement !== field) field.value = Number(value.toPrecision(8));
  }
  update();
  const row = element("div", { class: "row" }, [element("span", { class: "sign", text: sign }), slider, field]);
  row.update = update;
  return row;
}

function formulaSection() {
  const wrong = element("p", { class: "warning", id: "formula-error", role: "alert", hidden: true });
  const input = element("input", { type: "text", id: "formula", spellcheck: "false", autocomplete: "off", value: explored.formula, placeholder: "x/(1+abs(x)**3)**(1/3)", "aria-label": "Formula of x" });
  const take = (event) => {
    event.preventDefault();
    try {
      const f = formula(input.value.trim());
      if (![-1, 1, 30].every((u) => Number.isFinite(f(u)))) throw new FormulaError("The formula is not finite for all x that occur.");
      Object.assign(explored, { formula: input.value.trim(), values: null });
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
    explored.formula ? button("Drop it", () => { Object.assign(explored, { formula: "", values: null }); render(); }, { class: "link" }) : null,
    remark(`Of x, numbers, pi, e, + − * / **, brackets, and ${Object.keys(CALLED).join(", ")}. It is parsed here, and never run as code.`),
  ]);
}
