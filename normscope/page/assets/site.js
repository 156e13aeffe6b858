"use strict";
// One site: its S-curve, what the curves leave, its derivative, its fits, its card; tokens and channels to pick.

const MOST_LISTED = 60;

function siteView() {
  const { site } = open;
  if (!site) return [warning("This capture contains no norm site.")];
  const head = element("div", { class: "site-head" }, [
    element("div", {}, [element("h2", { text: siteTitle(site), title: visible(site.name) }), remark(siteSummary(site))]),
    steps(),
  ]);
  if (site.nothing) return [head, warning(`There is nothing to draw here: ${visible(site.nothing)}.`), cardOf(site)];
  const key = element("div", { id: "colour-key", class: "group note" });
  const title = siteTitle(site);
  const main = figure({
    label: `S-curve of ${title}: outputs against inputs of all pairs, with fitted curves`, title: `${captureName(open.capture)} · ${title}`, size: "tall",
    scene: () => {
      key.replaceChildren(...keyParts(site));
      return scurveScene(site);
    },
  }, { heading: "S-curve" });
  const inputs = inputsSection(site, main.plot);
  const first = [element("div", { class: "controls" }, [colourChoice(), scaleChoice(), curveToggles(["mean", ...open.capture.curves])]), main.whole, key];
  const column = (name, parts) => element("div", { class: name }, parts);
  return [
    head,
    column("columns", [column("figures", first), inputs || column("beside", [picker(site)])]),
    fitsOfSite(site),
    column("columns", [
      column("figures", [residualFigure(site), derivativeFigure(site)]), column("beside", [inputs && picker(site), cardOf(site)]),
    ]),
  ];
}

function siteSummary(site) {
  const parts = [visible(site.name), siteDetail(site), `${grouped(site.pairs)} pairs of ${grouped(site.tokens)} tokens`, `eps ${number(site.eps)}`];
  if (site.folds) parts.push(`folds by ${site.folds}`);
  if (site.left_out) parts.push(`${grouped(site.left_out)} tokens left out that contain a NaN or an infinity`);
  return parts.join(" · ");
}

// Buttons to the site before and after, and a list of all.
function steps() {
  const { sites } = open.capture;
  const step = (by, text, label) => button(text, () => stepSite(by), { "aria-label": label, disabled: !sites[state.site + by] });
  const list = dropdown(siteOptions(open.capture), state.site, (site) => go({ site: Number(site) }), { "aria-label": "Site", id: "sites" });
  return element("div", { class: "steps" }, [step(-1, "←", "Previous site"), list, step(1, "→", "Next site")]);
}

function siteOptions({ sites }) {
  return sites.map((site, place) => [place, shortly(siteTitle(site)), visible(site.name)]);
}

function stepSite(by) {
  const site = state.site + by;
  if (open.capture.sites[site]) go({ site });
}

function colourChoice() {
  return choice("Colour by", asOptions(COLOURS), state.colour, (colour) => go({ colour }));
}

function scaleChoice() {
  return choice("Axis of x", asOptions(SCALES), state.scale, (scale) => {
    Plot.all.forEach((plot) => { plot.zoom = null; });
    go({ scale });
  });
}

// What the colours of the S-curve stand for.
function keyParts(site) {
  const { axes, shown } = site.drawn;
  if (state.colour === "density") {
    const bound = site.bound === null ? "" : ` · dotted: y within ±${number(site.bound)}`;
    return ramp("pairs per cell: 1", DENSITY[palette.theme], `${grouped(axes[state.scale].density.most)}, on a logarithmic scale${bound}`);
  }
  const drawn = `${shown.key.length} of ${grouped(site.tokens)} tokens: ${shown.uniform} drawn uniformly, the others those of largest |x|`;
  if (state.colour === "token") {
    const { low, high } = sigmaColours(site).scale;
    return ramp(`σ ≤ ${short(low)}`, VIRIDIS, `≥ ${short(high)} · ${drawn}`);
  }
  const extreme = site.channels === null && !site.drawn.by_channel.x ? [] : colouredChannels(site);
  return [...extreme.map((channel, rank) => keyDot(palette.style.channels[rank], `channel ${channel}`)), element("span", { text: `others grey · ${drawn}` })];
}

function residualFigure(site) {
  const x = numbersOf(site.drawn.residuals.x);
  if (!x.length) return null;
  const twice = numbersOf(site.drawn.residuals.error).map((value) => 2 * value);
  const scene = () => residualScene(site, x, Object.entries(site.drawn.residuals.off).filter(([curve]) => !state.hidden.has(curve)).map(([curve, off]) => ({
    x, y: numbersOf(off), name: curve, width: 1.8, ...palette.curve(curve),
  })), twice);
  const note = site.folds ? `Grey: ±2 standard errors of E[y|x], over folds by ${site.folds}.` : "Without folds there is no standard error.";
  return figure({ label: `Residuals at ${siteTitle(site)}`, title: `${siteTitle(site)} · residuals`, height: 230, scene }, { heading: "Residuals", note }).whole;
}

// Lines of E[y|x] less a curve along the x that is shown, with a band of twice its standard error.
function residualScene(site, x, lines, twice = []) {
  const axis = axisOfSite(site);
  const within = (y) => Array.from(y).filter((value, place) => Number.isFinite(value) && x[place] >= axis.low && x[place] <= axis.high);
  const reach = 1.08 * Math.max(...[...lines.map(({ y }) => y), twice].flatMap(within).map(Math.abs), 1e-9);
  const errors = (place) => (Number.isFinite(twice[place]) ? [`2 standard errors ${short(twice[place])}`] : []);
  return {
    x: axis, y: new Axis(-reach, reach), xlabel: xLabel(axis), ylabel: "E[y|x] − curve", lines,
    bands: bandOf(x, twice), levels: [{ y: 0, colour: palette.style.ink, dashes: "" }],
    hover: { x, text: (place) => [`x ${number(x[place])}`, ...lines.map(({ name, y }) => `${name} ${short(y[place])}`), ...errors(place)] },
  };
}

function bandOf(x, twice) {
  const known = Array.from(x.keys()).filter((place) => Number.isFinite(twice[place]));
  if (known.length < 2) return [];
  const at = (values) => known.map((place) => values[place]);
  return [{ x: at(x), low: at(twice).map((value) => -value), high: at(twice), colour: palette.style.faint }];
}

function derivativeFigure(site) {
  const { diagonal } = site.drawn;
  const heading = "Derivative";
  if (diagonal.reason) {
    return element("figure", {}, [element("figcaption", {}, [element("h3", { text: heading })]), remark(`No closed form of the norm's own: ${visible(diagonal.reason)}.`)]);
  }
  const [x, slopes] = [numbersOf(diagonal.x), numbersOf(diagonal.y)];
  const scene = () => {
    const axis = axisOfSite(site);
    const lines = curveLines(site, "derivative");
    if (diagonal.mean) lines.unshift({ x: numbersOf(diagonal.mean.x), y: numbersOf(diagonal.mean.y), colour: palette.style.ink, width: 2, name: "mean over all pairs" });
    const sorted = Float32Array.from(slopes).sort();
    const top = 1.1 * Math.max(sorted[Math.floor(0.995 * (sorted.length - 1))], ...lines.flatMap(({ y }) => Array.from(y)).filter((value) => Number.isFinite(value) && value < 4 * sorted.at(-1)));
    return {
      x: axis, y: new Axis(Math.min(0, 1.1 * sorted[Math.floor(0.005 * sorted.length)]), top), xlabel: xLabel(axis), ylabel: "∂y / ∂x", lines,
      paint: [(context, plot) => paintDots(context, plot, x, slopes, { size: 2, colours: [palette.style.faint], alpha: 0.5 })],
      hover: { x, y: slopes, text: (place) => [`x ${number(x[place])}`, `∂y/∂x ${number(slopes[place])}`] },
    };
  };
  const note = `Grey: the diagonal ∂yᵢ/∂xᵢ of the norm's Jacobian on drawn tokens${diagonal.mean ? "; thick: its mean over all pairs" : ""}; lines: the curves' derivatives.`;
  return figure({ label: `Derivatives at ${siteTitle(site)}`, title: `${siteTitle(site)} · derivative`, height: 260, scene }, { heading, note }).whole;
}

function fitsOfSite(site) {
  const heads = ["curve", "A", "α", "s", "slope", "R²", "held-out R²", "ceiling", "RMSE", "tail", "saturated"];
  const rows = site.fits.map((fit) => {
    if (fit.nothing) return [fit.curve, visible(fit.nothing), ...Array(9).fill("–")];
    const [a, alpha] = fit.doubt ? [fit.doubt, cell(null)] : [spread(fit, "amplitude"), spread(fit, "alpha")];
    return [
      { text: fit.curve, node: button(fit.curve, () => go({ view: "explorer", curve: fit.curve }), { class: "link", title: `${formulaOf(fit.curve)}; open in the explorer` }) },
      a, alpha, cell(fit.shift, short), cell(fit.slope), spread(fit, "r2", score), cell(fit.r2_cv, score), spread(fit, "r2_ceiling", score),
      cell(fit.rmse), cell(fit.tail_rmse), cell(fit.saturated, percent),
    ];
  });
  const low = site.fits.some((fit) => fit.x_repeats) ? " · The ceiling is underestimated here: many x are identical." : "";
  const caption = `y ≈ A·f(αx + s) · ±: half of the 95% interval, over folds${low}`;
  return section("h3", "Fits", [table(`${siteTitle(site)} fits`, heads, rows, { caption })]);
}

function spread(fit, name, write = number) {
  const interval = fit.intervals[name];
  const half = interval && interval.every(Number.isFinite) ? ` ±${number((interval[1] - interval[0]) / 2, 2)}` : "";
  return { text: `${write(fit[name])}${half}`, value: fit[name] ?? "" };
}

function cardOf(site) {
  return section("h3", "Norm card", [card(site.card)]);
}

// A button that drops what it names.
function chip(colour, text, drop, attributes) {
  const made = button("", drop, { class: "chip", ...attributes });
  made.append(keyDot(colour, `${text} ×`));
  return made;
}

// The tokens and channels that are picked, each in its colour, on every site.
function pickBar() {
  const host = element("p", { class: "picks" });
  Plot.add({ host, draw: () => host.replaceChildren(...(state.picks.length ? state.picks.map((pick, place) => chip(palette.style.channels[place], pickName(pick), () => {
    go({ picks: state.picks.filter((other) => other !== pick) });
  }, { "aria-label": `Drop ${pickName(pick)}` })) : [element("span", { class: "note", text: "Nothing is picked: a token or channel that you pick at a site lights up in all of them." })])) });
  return host;
}

function picker(site) {
  const results = element("ul", { class: "results" });
  const list = { host: results, later: true, draw: () => refill(results, resultLines(site, search.value)) };
  const search = element("input", { type: "search", id: "search", placeholder: "channel 12, sample 3, token 0 …", "aria-label": "Search tokens and channels", oninput: list.draw });
  Plot.add(list);
  return element("section", { class: "picker" }, [
    element("h3", { text: "Tokens and channels" }),
    remark(`Up to ${MOST_PICKS}; each lights up here and in all other sites.`),
    search, pickBar(), results,
  ]);
}

// Lines of the list of entries: buttons that pick what they name, or let it go. Tokens are read when the list reaches them.
function resultLines(site, text) {
  const channels = channelEntries(site);
  const unread = !asWords(text) && channels.length > MOST_LISTED;
  const all = unread ? channels : those([...channels, ...tokenEntries(site)], text);
  const lines = all.slice(0, MOST_LISTED).map(({ pick, name, detail }) => {
    const others = state.picks.filter((other) => other !== pick);
    const on = others.length < state.picks.length;
    const picks = on ? others : [...others, pick].slice(-MOST_PICKS);
    return element("button", { type: "button", id: `pick-${pick}`, "aria-pressed": String(on), onclick: () => go({ picks }) }, [
      element("span", { text: name }), " ", element("span", { class: "detail", text: detail() }),
    ]);
  });
  const unlisted = `and ${grouped(all.length - MOST_LISTED)} more${unread ? " channels, and the tokens" : ""}`;
  const rest = all.length ? unlisted : "No token or channel has this name.";
  const more = all.length && all.length <= MOST_LISTED ? [] : [element("span", { class: "note", text: rest })];
  return [...lines, ...more].map((line) => element("li", {}, [line]));
}

// Entries that hold the words that are searched for; only where there are none, those that begin so.
function those(entries, text) {
  const wanted = ` ${asWords(text)}`;
  if (wanted === " ") return entries;
  const exact = entries.filter(({ name }) => ` ${asWords(name)} `.includes(`${wanted} `));
  return exact.length ? exact : entries.filter(({ name }) => ` ${asWords(name)}`.includes(wanted));
}

function asWords(text) {
  return text.toLowerCase().split(/[\s,]+/).filter(Boolean).join(" ");
}

const channelEntries = cached((site) => {
  if (site.channels === null && !site.drawn.by_channel.x) return [];
  const [reach, share] = [numbersOf(site.drawn.by_channel.reach), numbersOf(site.drawn.by_channel.share)];
  return largestFirst(reach).map((channel) => ({
    pick: `channel:${channel}`, name: `channel ${channel}`,
    detail: () => `max |x| ${short(reach[channel])} · ${percent(share[channel])} of Σx²`,
  }));
});

const tokenEntries = cached((site) => {
  const sigma = numbersOf(site.drawn.shown.sigma);
  const { x, token } = pointsOf(site);
  const most = new Float64Array(site.drawn.shown.key.length);
  for (let place = 0; place < x.length; place += 1) if (token[place] >= 0) most[token[place]] = Math.max(most[token[place]], Math.abs(x[place]));
  const order = [...new Map(site.drawn.shown.key.map((key, place) => [key, place])).values()].sort((one, other) => most[other] - most[one]);
  return order.map((place) => ({
    pick: `token:${site.drawn.shown.key[place]}`, name: tokenName(site, place),
    detail: () => `max |x| ${short(most[place])} · σ ${short(sigma[place])}`,
  }));
});
