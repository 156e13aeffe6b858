"use strict";
// What a swap did: how far the output moved, site by site and one after the other, how good it still is, how fast.

function swapView() {
  const { drift, speed } = PAGE.swaps;
  return [...(drift.length ? driftSections(drift) : []), ...speed.map(speedSection)];
}

function swapName({ func, init }) {
  return visible([func, init].filter(Boolean).join(" "));
}

// The look of the curve in the norms' place; of no curve, another colour.
function swapLook(report, number) {
  const { channels } = palette.style;
  const func = report.func.toLowerCase();
  const [curve] = Object.entries(PAGE.curves).find(([name, { aliases }]) => name === func || aliases.includes(func)) || [];
  return Object.hasOwn(palette.style.curves, curve) ? palette.curve(curve) : { colour: channels[number % channels.length], dashes: [] };
}

function driftSections(reports) {
  const sites = [...new Set(reports.flatMap((report) => report.sites))];
  const alone = figure({
    label: "Drift with each site swapped alone", height: 260, zooms: false,
    scene: () => driftScene(reports, sites, "one", (row) => sites.indexOf(row.site), "norm site, in the order of calls"),
  }, { heading: "One site swapped", note: "Median over inputs of the relative L2 at the network's output; bars: 10th to 90th percentile." });
  const together = figure({
    label: "Drift with one site, two sites, … swapped", height: 260, zooms: false,
    scene: () => driftScene(reports, sites, "cumulative", (row) => row.sites_swapped, "number of sites swapped, the least harmful first"),
  }, { heading: "One after the other" });
  const about = reports[0].about;
  return [
    section("h2", "Drift", [
      remark(visible(Object.values(about).join(" · "))), driftTable(reports),
      element("div", { class: "controls" }, reports.map((report, place) => {
        const { colour, dashes } = swapLook(report, place);
        return element("span", { class: "key" }, [swatch(colour, dashes), swapName(report)]);
      })),
      element("div", { class: "strip" }, [alone.whole, together.whole]),
      sitesTable(reports, sites), ...qualitySection(reports),
    ]),
  ];
}

function driftScene(reports, sites, swapped, placeOf, xlabel) {
  const series = reports.map((report, number) => {
    const rows = report.rows.filter((row) => row.swapped === swapped && row.relative_l2.p50 !== null);
    return { name: swapName(report), rows, x: rows.map(placeOf), y: rows.map((row) => row.relative_l2.p50), ...swapLook(report, number) };
  });
  const every = series.flatMap(({ rows }) => rows.flatMap((row) => [row.relative_l2.p10, row.relative_l2.p50, row.relative_l2.p90]));
  const last = Math.max(...series.flatMap(({ x }) => x), 1);
  const bars = series.flatMap(({ rows, colour }) => rows.map((row) => ({ x: [placeOf(row), placeOf(row)], y: [row.relative_l2.p10, row.relative_l2.p90], colour, width: 1, halo: false })));
  const first = swapped === "one" ? 0 : 1;
  const numbers = new Map(PAGE.captures.flatMap((capture) => capture.sites.map(({ name, index }) => [name, index])));
  const places = Array.from({ length: last + 1 - first }, (_, place) => place + first);
  return {
    x: new Axis(first - 0.5, last + 0.5, { whole: true }), y: axisOf(every.filter((value) => value !== null), { zero: true }),
    xlabel, ylabel: "relative L2", ...(swapped === "one" ? { names: (place) => String(numbers.get(sites[place]) ?? shortly(sites[place] ?? "", 12)) } : {}),
    lines: [...bars, ...series.map(({ x, y, colour, dashes, name }) => ({ x, y, colour, dashes, name, width: 1.4 }))],
    marks: series.flatMap(({ x, y, colour, name }) => x.map((at, place) => ({ x: at, y: y[place], colour, name }))),
    hover: { x: places, text: (place) => [swapped === "one" ? visible(sites[place] || "") : `${place} swapped`, ...series.map(({ name, x, y }) => `${name} ${short(y[x.indexOf(place)])}`)] },
  };
}

function driftTable(reports) {
  const heads = ["func", "init", "sites", "inputs", "L2", "p90 of L2", "cosine", "p10 of cosine", "top-1", "not finite"];
  const rows = reports.map((report) => {
    const row = report.rows.find(({ swapped, at, part }) => swapped === "all" && at === "output" && !part);
    if (!row) return [report.func, report.init, ...Array(8).fill("–")];
    return [report.func, report.init, cell(row.sites_swapped), cell(row.inputs), endless(row.relative_l2.p50), endless(row.relative_l2.p90),
      cell(row.cosine.p50), cell(row.cosine.p10), cell(row.top1, percent), cell(row.nonfinite)];
  });
  return table("Drift with all sites swapped", heads, rows, { caption: "All sites swapped, without training; ∞: not finite.", terms: PAGE.terms.swaps });
}

// JSON holds null for what is not finite: an output that is infinitely far.
function endless(value) {
  return { text: value === null ? "∞" : short(value), value: value ?? "inf" };
}

function sitesTable(reports, sites) {
  const heads = ["site", ...reports.map(swapName)];
  const rows = sites.map((site) => [site, ...reports.map((report) => {
    const row = report.rows.find((one) => one.swapped === "one" && one.site === site);
    return row ? endless(row.relative_l2.p50) : cell(null);
  })]);
  return table("Drift by site", heads, rows, { caption: "One site alone swapped: median over inputs of the relative L2 at the output.", terms: PAGE.terms.swaps });
}

function qualitySection(reports) {
  const measured = reports.filter(({ quality }) => quality);
  if (!measured.length) return reports[0].no_quality ? [remark(`No quality: ${visible(reports[0].no_quality)}.`)] : [];
  const { name, over, higher_is_better: higher } = measured[0].quality;
  const score = ({ value, interval }) => ({ text: `${number(value)}${interval ? ` (${interval.map((bound) => short(bound)).join(" – ")})` : ""}`, value: value ?? "" });
  const rows = [["original", "", score(measured[0].quality.scores.original || { value: null })]];
  for (const report of measured) {
    for (const [network, value] of Object.entries(report.quality.scores)) if (network !== "original") rows.push([`${report.func}${network === "swapped" ? "" : `, ${network}`}`, report.init, score(value)]);
  }
  return [element("h3", { text: "Quality" }), table("Quality", ["norms", "init", name], rows, { caption: `${over} · ${higher === false ? "lower" : "higher"} is better · in brackets 95%`, terms: PAGE.terms.swaps })];
}

function speedSection(report) {
  const heads = ["what", "variant", "way", "passes", "dtype", "shape", "time", "p25–p75", "ratio", "n", "verdict"];
  const thousand = (seconds) => cell(seconds === null ? null : 1000 * seconds, short);
  const rows = report.rows.map((row) => [
    row.scope, row.variant, row.way, row.passes, row.dtype, row.shape.join(" × "), thousand(row.median),
    row.p25 === null || row.p75 === null ? "–" : `${short(1000 * row.p25)} – ${short(1000 * row.p75)}`, { text: row.ratio === null ? "–" : `${short(row.ratio)} ×`, value: row.ratio ?? "" },
    cell(row.n), [row.verdict, row.note].filter(Boolean).join("; "),
  ]);
  const about = Object.values(report.about).join(" · ");
  return section("h2", "Speed", [
    remark(visible(`on ${report.device}; ${about}`)),
    table("Speed", heads, rows, { caption: "Times in ms. Faster only where all of p25–p75 lies below that of the network's own norm; slower likewise; inconclusive: neither. n: number of times measured.", terms: PAGE.terms.swaps }),
    ...report.left_out.map((line) => remark(visible(line))),
  ]);
}
