"use strict";
// Several captures beside one another: the same site of each, on the same axes, with what differs in numbers.

// The site of another capture that stands beside one of the first; null where there is none.
function counterpart(capture, name) {
  const other = PAGE.matches[capture][name];
  const place = PAGE.captures[capture].sites.findIndex((site) => site.name === other);
  return place < 0 ? null : { site: PAGE.captures[capture].sites[place], place };
}

// The name in the first capture of what is open, which may be a site of another.
function firstName() {
  const found = Object.entries(PAGE.matches[state.capture]).find(([, other]) => other === open.site.name);
  return found ? found[0] : null;
}

function compareView() {
  const head = [element("h2", { text: "Compare" })];
  if (PAGE.captures.length < 2) {
    return [...head, remark("This page holds one capture. Several stand beside one another here: normscope report ONE.safetensors OTHER.safetensors.")];
  }
  const name = open.site ? firstName() : null;
  if (name === null) return [...head, remark("This site has no counterpart in the first capture. Choose another."), steps()];
  const found = PAGE.captures.map((capture, place) => ({ capture, at: counterpart(place, name), number: place }));
  const there = found.filter(({ at }) => at && !emptiness(at.site));
  const shared = sharedScales(there.map(({ at }) => at.site));
  const panels = found.map(({ capture, at, number: place }) => {
    const heading = captureTitle(capture);
    if (!at || emptiness(at.site)) return element("figure", {}, [element("h3", { text: heading }), remark(at ? visible(emptiness(at.site)) : "No site of this capture stands beside this one.")]);
    const scene = () => scurveScene(at.site, shared);
    return figure({ label: `S-curve of ${heading}, ${siteTitle(at.site)}`, title: `${heading} · ${siteTitle(at.site)}`, height: (width) => Math.round(clipped(0.7 * width, 220, 420)), scene },
      { heading: `${heading} · ${siteTitle(at.site)}`, note: visible([capture.about.weights, capture.about.data].filter(Boolean).join(" · ")) }).whole;
  });
  return [
    element("div", { class: "site-head" }, [...head, steps()]),
    element("div", { class: "controls" }, [colourChoice(), curveToggles(open.capture.curves)]),
    remark("All panels have the same axes."),
    element("div", { class: "side-by-side" }, panels),
    compareTable(name),
  ];
}

// Axes that hold every pair of several sites.
function sharedScales(sites) {
  const high = Math.max(...sites.map(({ axis }) => axis.limits[1]));
  const top = Math.max(...sites.map(({ axis }) => axis.y[1]));
  const linear = sites.filter(({ axis }) => axis.usual === "asinh").map(({ axis }) => axis.linear).filter(Boolean);
  return sites.length ? { axis: new Axis(-high, high, { linear: linear.length ? Math.min(...linear) : null }), y: [-top, top] } : {};
}

// A row a capture and curve, at one site.
function compareTable(name) {
  const heads = ["capture", "site", "curve", "A", "α", "slope", "R²", "ceiling", "σ median", "σ 95:5", "|μ|/σ", "max |x| : median"];
  const rows = PAGE.captures.flatMap((capture, place) => {
    const at = counterpart(place, name);
    if (!at) return [];
    const { numbers, fits } = at.site;
    const ratio = numbers.median ? numbers.largest / numbers.median : null;
    const of = [cellOf(numbers.sigma, 3), cellOf(numbers.spread, 3), cellOf(numbers.offset, 3), cellOf(ratio, 3)];
    return fits.map((fit) => [captureTitle(capture), at.site.name, fit.curve, ...fitCells(fit).slice(0, 2), cellOf(fit.slope), cellOf(fit.nothing ? null : fit.r2), cellOf(fit.r2_ceiling), ...of]);
  });
  return table(`Compared at ${visible(name)}`, heads, rows);
}
