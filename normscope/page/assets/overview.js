"use strict";
// The overview: every site of a capture over the depth, all sites in small, and the same numbers as a table.

const SHAPES = ["●", "■", "◆", "▲", "▼"];

function overviewView() {
  const { capture } = open;
  if (!capture.sites.length) return [warning("This capture contains no norm site.")];
  const kinds = [...new Set(capture.sites.map(kindOfSite))];
  const figures = depthRows(capture).map((row) => depthFigure(capture, row, kinds));
  return [
    section("h2", "Over the depth", [
      remark("Each mark is one norm, in the order of calls. Hover for numbers, click to open."),
      legend(capture, kinds), element("div", { class: "strip" }, figures),
    ], "depth"),
    section("h2", "All sites", [
      remark("All pairs with E[y|x] and the fits, and what you picked. The axes are each site's own."),
      pickBar(), thumbnails(capture),
    ], "all"),
    section("h2", "Numbers", [overviewTable(capture)], "numbers"),
    aboutCapture(capture),
  ];
}

// What is drawn over the depth: {name, zero, whole, series: [{label, colour, dashes, values, level}]}.
function depthRows(capture) {
  const { ink } = palette.style;
  const ofSites = (value) => capture.sites.map((site) => value(site) ?? NaN);
  const told = (name) => (fit) => (fit && !fit.doubt && !fit.nothing ? fit[name] : NaN);
  const ofCurves = (value) => capture.curves.map((curve) => ({
    label: curve, ...palette.curve(curve), values: ofSites((site) => value(site.fits.find((fit) => fit.curve === curve))),
  }));
  const one = (label, value) => ({ label, colour: ink, values: ofSites(({ numbers }) => value(numbers)) });
  const ceiling = { label: "ceiling", colour: ink, values: ofSites(({ fits }) => fits.length ? fits[0].r2_ceiling : null), level: true };
  const rows = [
    capture.sites.some(({ folds }) => folds)
      ? { name: "Held-out R² and ceiling", series: [...ofCurves((fit) => fit && !fit.nothing ? fit.r2_cv : NaN), ceiling] }
      : { name: "R²", series: ofCurves((fit) => fit && !fit.nothing ? fit.r2 : NaN) },
    { name: "Amplitude A", series: ofCurves(told("amplitude")) },
    { name: "Scale α, in units of 1/x", series: ofCurves(told("alpha")) },
    { name: "Spread of σ: 95th percentile over the 5th", series: [one("σ 95 : 5", ({ spread }) => spread)] },
    { name: "|μ|/σ of the tokens", zero: true, series: [one("median", ({ offset }) => offset), { ...one("95%", (all) => all.offset_p95), level: true }] },
    { name: "Pairs beyond the linear range, %", zero: true, series: [one("share", ({ bent }) => bent === null ? null : 100 * bent)] },
    { name: "Σx² in three channels, %", zero: true, series: [one("share", (all) => all.channel_share === null ? null : 100 * all.channel_share)] },
    { name: "Massive channels, and massive tokens of 16", zero: true, whole: true, series: [
      one("channels", (all) => all.massive_channels), { ...one("tokens", (all) => all.massive_tokens), level: true },
    ] },
  ];
  return [...rows, ...driftRows(capture)].filter(({ series }) => series.some(({ values }) => values.some((value) => Number.isFinite(value) && value !== 0)));
}

// How far the output moves with each site alone swapped, where that was measured of this network.
function driftRows(capture) {
  const reports = PAGE.swaps.drift.filter((report) => capture.sites.some(({ name }) => report.sites.includes(name)));
  const series = reports.map((report, number) => {
    const alone = new Map(report.rows.filter(({ swapped }) => swapped === "one").map((row) => [row.site, row.relative_l2.p50]));
    return { label: `${report.func} ${report.init}`.trim(), ...swapLook(report, number), values: capture.sites.map(({ name }) => alone.get(name) ?? NaN) };
  });
  return series.length ? [{ name: "Drift with one site swapped, relative L2", zero: true, series }] : [];
}

function depthFigure(capture, row, kinds) {
  const kindAt = capture.sites.map(kindOfSite);
  const scene = () => {
    const shown = row.series.filter(({ label }) => !state.hidden.has(label));
    return {
      x: new Axis(-0.5, capture.sites.length - 0.5, { whole: true }),
      y: axisOf(shown.flatMap(({ values }) => values), row),
      names: (place) => (capture.sites[place] ? String(capture.sites[place].index) : ""),
      xlabel: "norm site, in the order of calls",
      lines: shown.flatMap((series) => kindLines(series, kindAt, kinds)),
      marks: shown.flatMap(({ colour, values, label, level }) => values.map((y, x) => ({ x, y, colour, shape: kinds.indexOf(kindAt[x]), size: level ? 2 : 3.6, name: label })))
        .filter(({ y }) => Number.isFinite(y)),
      hover: { x: [...kindAt.keys()], text: (place) => [siteTitle(capture.sites[place]), ...row.series.map(({ label, values }) => `${label} ${number(values[place])}`)] },
    };
  };
  const label = `${row.name}, over ${capture.sites.length} norm sites`;
  return figure({ label, height: 178, scene, zooms: false, open: (site) => go({ view: "site", site }) }, { heading: row.name }).whole;
}

// A thin line through the sites of each kind, and a mark at each.
function kindLines({ colour, dashes = [], values, label: name, level = false }, kindAt, kinds) {
  return kinds.map((kind) => {
    const x = Array.from(kindAt.keys()).filter((place) => kindAt[place] === kind);
    return { x, y: x.map((place) => values[place]), colour, dashes: level ? [1, 2] : dashes, width: 1.1, halo: false, opacity: 0.7, name };
  });
}

function legend(capture, kinds) {
  const shapes = kinds.map((kind, place) => element("span", { class: "key", text: `${SHAPES[place % SHAPES.length]} ${shortly(kind)}` }));
  return element("div", { class: "controls" }, [
    curveToggles(capture.curves),
    element("div", { class: "group" }, [...shapes, element("span", { class: "key", text: "small and dotted: the ceiling, the 95th percentile of |μ|/σ, massive tokens" })]),
  ]);
}

// Buttons that show or hide curves, and E[y|x].
function curveToggles(curves) {
  return element("div", { class: "group", role: "group", "aria-label": "Curves" }, curves.map((curve) => {
    const isMean = curve === "mean";
    const { colour, dashes } = palette.curve(curve);
    const pressed = () => String(!state.hidden.has(curve));
    const made = button("", () => {
      const hidden = new Set(state.hidden);
      if (!hidden.delete(curve)) hidden.add(curve);
      go({ hidden });
      made.setAttribute("aria-pressed", pressed());
    }, { "aria-pressed": pressed(), title: isMean ? null : formulaOf(curve) });
    made.append(swatch(colour, dashes), isMean ? "E[y|x]" : curve);
    return made;
  }));
}

function formulaOf(curve) {
  return `${curve}: ${PAGE.curves[curve].formula}`;
}

function thumbnails(capture) {
  return element("div", { class: "thumbnails" }, capture.sites.map((site, place) => {
    const host = element("span");
    if (!site.nothing) {
      const scene = () => scurveScene(site, { colour: "density", thin: true, hovers: false, lines: curveLines(site, "line", 1.2) });
      new Plot(host, { label: `S-curve of ${siteTitle(site)}`, size: "small", scene, zooms: false });
    }
    return element("button", { type: "button", class: "thumbnail", title: visible(site.name), onclick: () => go({ view: "site", site: place }) }, [
      element("span", { class: "name", text: shortly(siteTitle(site)) }), host, element("span", { class: "detail", text: thumbnailText(site) }),
    ]);
  }));
}

function thumbnailText(site) {
  if (site.nothing) return visible(site.nothing);
  const best = site.fits.filter((fit) => !fit.nothing).sort((one, other) => other.r2 - one.r2)[0];
  return best ? `${best.curve} R² ${score(best.r2, 3)}` : siteDetail(site);
}

function overviewTable(capture) {
  const heads = ["#", "site", "kind", "placement", "pairs"];
  for (const curve of capture.curves) heads.push(`${curve} A`, `${curve} α`, `${curve} R²`, `${curve} held-out R²`);
  heads.push("ceiling", "|μ|/σ", "σ median", "σ 95:5", "beyond linear", "Σx² in 3", "massive pairs", "massive channels");
  const rows = capture.sites.map((site, place) => [
    cell(site.index),
    { text: site.name, node: button(visible(site.name), () => go({ view: "site", site: place }), { class: "link" }) },
    site.kind, site.placement || "–", cell(site.pairs, grouped),
    ...capture.curves.flatMap((curve) => fitCells(site.fits.find((fit) => fit.curve === curve))),
    cell(site.fits.length ? site.fits[0].r2_ceiling : null, score),
    cell(site.numbers.offset, short), cell(site.numbers.sigma, short), cell(site.numbers.spread, short),
    cell(site.numbers.bent, percent), cell(site.numbers.channel_share, percent),
    cell(site.numbers.massive, grouped), cell(site.numbers.massive_channels),
  ]);
  const heldOut = capture.sites.some(({ folds }) => folds);
  const printed = ["#", "site", "ceiling", "|μ|/σ", "σ 95:5", ...capture.curves.flatMap((curve) => (
    [`${curve} A`, `${curve} α`, `${curve} ${heldOut ? "held-out R²" : "R²"}`]))];
  return table(`${captureName(capture)} sites`, heads, rows, { chosen: state.site, unprinted: heads.filter((name) => !printed.includes(name)) });
}

// A cell of a table: a value, and how it is written.
function cell(value, write = number) {
  return { text: write(value), value: value ?? "" };
}

// A, α, R² and held-out R² of a fit; the reason in their place where there is none.
function fitCells(fit) {
  if (!fit || fit.nothing) return [fit ? visible(fit.nothing) : cell(null), cell(null), cell(null), cell(null)];
  const values = fit.doubt ? [fit.doubt, cell(null)] : [cell(fit.amplitude), cell(fit.alpha)];
  return [...values, cell(fit.r2, score), cell(fit.r2_cv, score)];
}

function aboutCapture(capture) {
  const lines = [
    ...Object.entries(capture.about),
    ["samples", grouped(capture.samples)], ["seed", String(capture.seed)],
    ["pairs weighted by", capture.weights_by],
    ["versions", Object.entries(capture.versions).filter(([, version]) => version !== "not installed").map((pair) => pair.join(" ")).join(", ")],
    ...(capture.inputs.length ? [] : [["inputs inside", "none; normscope capture --keep-inputs 2 keeps some to look at, at each site"]]),
    ...capture.skipped.map(({ name, kind, reason }) => ["skipped", `${name} (${kind}): ${reason}`]),
  ];
  return section("h2", "What this was taken from", [card(lines)], "about");
}
