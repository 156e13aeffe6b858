"use strict";
// Several captures beside one another: the same site of each, on the same axes, with what differs in numbers.

// The site of another capture that is the counterpart of one of the first; null where there is none.
function counterpart(capture, name) {
  const other = PAGE.matches[capture][name];
  const place = PAGE.captures[capture].sites.findIndex((site) => site.name === other);
  return place < 0 ? null : place;
}

// The name in the first capture of what is open, which may be a site of another.
function firstName() {
  const pair = open.site && Object.entries(PAGE.matches[state.capture]).find(([, other]) => other === open.site.name);
  return pair ? pair[0] : null;
}

// The number of the site of each capture: what is open, what the reader chose, or its counterpart.
function compared() {
  const name = firstName();
  return PAGE.captures.map((_, capture) => (capture === state.capture ? state.site : state.beside[capture] ?? counterpart(capture, name)));
}

function compareView() {
  const places = compared();
  const sites = PAGE.captures.map((capture, number) => capture.sites[places[number]]);
  const panels = PAGE.captures.map((capture, number) => {
    const site = sites[number];
    const choose = dropdown([...(site ? [] : [["", "choose a site"]]), ...siteOptions(capture)], places[number] ?? "", (place) => {
      if (number === state.capture) go({ site: Number(place) });
      else go({ beside: { ...state.beside, [number]: Number(place) } });
      render();
    }, { id: `beside-${number}`, "aria-label": `Site of ${captureTitle(capture)}` });
    const heading = captureTitle(capture);
    const empty = site ? site.nothing : "This site has no counterpart in this capture.";
    if (empty) return element("figure", {}, [element("figcaption", {}, [element("h3", { text: heading }), choose]), remark(visible(empty))]);
    const { whole } = figure(
      { label: `S-curve of ${heading}, ${siteTitle(site)}`, title: `${heading} · ${siteTitle(site)}`, size: "tall", scene: () => scurveScene(site, sharedScales(sites.filter((each) => each && !each.nothing), site)) },
      { heading, note: visible([siteSummary(site), capture.about.weights, capture.about.data].filter(Boolean).join(" · ")) },
    );
    whole.querySelector(".tools").prepend(choose);
    return whole;
  });
  return [
    element("div", { class: "site-head" }, [element("h2", { text: "Compare" }), steps()]),
    element("div", { class: "controls" }, [colourChoice(), scaleChoice(), curveToggles(["mean", ...open.capture.curves])]),
    remark("All panels have the same axes. Sites are matched by name or place; choose another one above a panel."),
    element("div", { class: "side-by-side" }, panels),
    compareTable(sites),
  ];
}

// Scales of a site that hold what the scales of several hold.
function sharedScales(sites, site) {
  const axes = sites.map((each) => axisOfSite(each));
  const [low, high] = extent(axes.flatMap((axis) => [axis.low, axis.high]));
  const y = extent(sites.flatMap(({ drawn }) => drawn.axes[state.scale].y));
  const linear = Math.min(...axes.map((axis) => axis.linear)) || null;
  const own = axes[sites.indexOf(site)];
  const beyond = own.low > low || own.high < high ? own.beyond.replace("· ", "· at most ") : own.beyond;
  return { axis: new Axis(low, high, { linear, beyond }), y };
}

// A row a capture and curve.
function compareTable(sites) {
  const heads = ["capture", "site", "curve", "A", "α", "slope", "R²", "held-out R²", "ceiling", "σ median", "σ 95:5", "|μ|/σ", "max |x| : median"];
  const rows = PAGE.captures.flatMap((capture, place) => {
    if (!sites[place]) return [];
    const { name, numbers, fits } = sites[place];
    const ratio = numbers.median ? numbers.largest / numbers.median : null;
    const of = [cell(numbers.sigma, short), cell(numbers.spread, short), cell(numbers.offset, short), cell(ratio, short)];
    return fits.map((fit) => {
      const [a, alpha, r2, heldOut] = fitCells(fit);
      return [captureTitle(capture), name, fit.curve, a, alpha, cell(fit.slope), r2, heldOut, cell(fit.r2_ceiling, score), ...of];
    });
  });
  return table("Comparison", heads, rows);
}
