"use strict";
// What is drawn of a site: its density, its tokens, its channels, its curves.

const FEW_POINTS = 1.6;
const LINE_POINTS = 33;

// An axis of x of a site: linear to where its curve is saturated, or asinh over all pairs.
function axisOfSite(site, scale = state.scale) {
  const { limits, width, beyond } = site.drawn.axes[scale];
  return new Axis(...limits, { linear: width, beyond: beyond ? ` · ${counted(beyond, "pair")} beyond` : "" });
}

function xLabel(axis) {
  return `norm input x${axis.linear ? " (asinh scale)" : ""}${axis.beyond}`;
}

// A density as a picture in the colours of the theme.
const densityPicture = cached((density) => {
  const [first, length, levels] = [density.first, density.length, density.levels].map(numbersOf);
  const rows = PAGE.density_rows;
  const picture = element("canvas", { width: first.length, height: rows });
  const context = picture.getContext("2d");
  const pixels = context.createImageData(first.length, rows);
  const [few, many] = DENSITY[palette.theme];
  const colours = Uint32Array.from({ length: 256 }, (_, level) => {
    const [red, green, blue] = between(few, many, level / 255); // level 0 is no pair
    return red | (green << 8) | (blue << 16) | (255 << 24);
  });
  const data = new Uint32Array(pixels.data.buffer);
  let place = 0;
  for (let column = 0; column < first.length; column += 1) {
    for (let row = first[column]; row < first[column] + length[column]; row += 1, place += 1) {
      if (levels[place]) data[(rows - 1 - row) * first.length + column] = colours[levels[place]];
    }
  }
  context.putImageData(pixels, 0, 0);
  return picture;
}, () => palette.theme);

// Where a linear axis goes farther than a site's own, as beside another site, the pairs beyond are those of its asinh axis.
function paintDensity(site) {
  return (context, plot) => {
    const { linear, asinh } = site.drawn.axes;
    const [low, high] = plot.x.linear ? [0, 0] : linear.limits;
    if (plot.shown.x.low < low || plot.shown.x.high > high) paintColumns(context, plot, asinh, low, high);
    if (!plot.x.linear) paintColumns(context, plot, linear);
  };
}

// Draws the columns of a density, without those between two x.
function paintColumns(context, plot, { limits, width, y, density }, low = 0, high = 0) {
  const picture = densityPicture(density);
  const edges = new Axis(...limits, { linear: width }).evenly(picture.width + 1);
  const [bottom, top] = y.map((end) => plot.upwards(end));
  context.imageSmoothingEnabled = false;
  let from = Math.floor(plot.across(edges[0]));
  for (let column = 0; column < picture.width; column += 1) {
    const to = Math.round(plot.across(edges[column + 1]));
    const shown = to > from && (edges[column] < low || edges[column + 1] > high || low === high);
    if (shown) context.drawImage(picture, column, 0, 1, picture.height, from, top, to - from, bottom - top);
    from = Math.max(from, to);
  }
}

// Colours of σ by factors, from low to high among the tokens that are shown.
function sigmaColours(site) {
  const sigma = numbersOf(site.drawn.shown.sigma);
  const scale = new Axis(...middle(sigma), { logarithmic: true });
  return { scale, colours: Array.from(sigma, (value) => viridis(scale.share(value))) };
}

function paintTokens(site) {
  return (context, plot) => {
    const { colours } = sigmaColours(site);
    const { x, y, token } = pointsOf(site);
    colours.forEach((colour, number) => tokenLine(context, plot, site, number, colour, 1, 0.5));
    paintDots(context, plot, x, y, { size: FEW_POINTS, colours, of: token, alpha: 0.6 });
  };
}

// Puts a square dot at each pair, in the colour whose place `of` holds, or the first; a pair of no colour is left out.
function paintDots(context, plot, x, y, { size, colours, of = null, alpha = 1 }) {
  context.globalAlpha = alpha;
  for (let place = 0; place < x.length; place += 1) {
    const colour = colours[of ? of[place] : 0];
    if (!colour) continue;
    context.fillStyle = colour;
    context.fillRect(plot.across(x[place]) - size / 2, plot.upwards(y[place]) - size / 2, size, size);
  }
  context.globalAlpha = 1;
}

// Points of y = (x − offset)/σ between two x: a straight line, which an asinh axis bends.
function straightLine(axis, offset, sigma, low, high) {
  const x = axis.within(low, high).evenly(LINE_POINTS);
  return { x, y: x.map((value) => (value - offset) / sigma) };
}

function tokenLine(context, plot, site, number, colour, width, alpha) {
  const { shown } = site.drawn;
  if (shown.x) return;
  const [offset, sigma] = [numbersOf(shown.offset)[number], numbersOf(shown.sigma)[number]];
  const y = numbersOf(shown.y).subarray(number * shown.width, (number + 1) * shown.width);
  const line = straightLine(plot.x, offset, sigma, ...extent(y).map((end) => offset + sigma * end));
  context.beginPath();
  line.x.forEach((x, place) => context.lineTo(plot.across(x), plot.upwards(line.y[place])));
  Object.assign(context, { strokeStyle: colour, lineWidth: width, globalAlpha: alpha });
  context.stroke();
  context.globalAlpha = 1;
}

// Channels that have a colour without being picked: none beside picks, whose colours are the same.
function colouredChannels(site) {
  return state.picks.length ? [] : largestFirst(numbersOf(site.drawn.by_channel.reach)).slice(0, palette.style.channels.length);
}

// Places of numbers, the largest first.
function largestFirst(values) {
  return Array.from(values.keys()).sort((one, other) => values[other] - values[one]);
}

function paintChannels(site) {
  return (context, plot) => {
    const { x, y, channel } = pointsOf(site);
    const extreme = colouredChannels(site);
    paintDots(context, plot, x, y, { size: FEW_POINTS, colours: [palette.style.faint], alpha: 0.45 });
    const ranks = channel.map((number) => extreme.indexOf(number));
    paintDots(context, plot, x, y, { size: 3.4, colours: palette.style.channels, of: ranks });
  };
}

const PAINTED = { density: paintDensity, token: paintTokens, channel: paintChannels };

// Number of a token among those that are shown at a site, by its key; −1 where it is not.
function placeOfToken(site, key) {
  return site.nothing ? -1 : site.drawn.shown.key.indexOf(key);
}

// Puts the picked tokens and channels above all else, each in a colour of its own.
function paintPicks(site, size = 4.4) {
  return (context, plot) => {
    state.picks.forEach((pick, number) => {
      const { x, y, token, channel } = pointsOf(site);
      const [kind, key] = pick.split(":");
      const [of, place] = kind === "token" ? [token, placeOfToken(site, key)] : [channel, Number(key)];
      if (place < 0) return;
      if (kind === "token") tokenLine(context, plot, site, place, palette.style.channels[number], 2, 1);
      const picked = of.map((value) => (value === place ? 0 : -1));
      paintDots(context, plot, x, y, { size: size + 1.6, colours: [palette.style.background], of: picked });
      paintDots(context, plot, x, y, { size, colours: [palette.style.channels[number]], of: picked });
    });
  };
}

// The fits of a site whose curves are not switched off, as lines along its own axis.
function curveLines(site, what = "line", width = 1.5) {
  const x = axisOfSite(site, "asinh").evenly(PAGE.line_points);
  return Object.entries(site.drawn.lines).filter(([curve]) => !state.hidden.has(curve)).map(([curve, lines]) => ({
    x, y: numbersOf(lines[what]), width, name: curve, ...palette.curve(curve),
  }));
}

function meanLine(site, width = 2) {
  return { x: numbersOf(site.drawn.mean.x), y: numbersOf(site.drawn.mean.y), colour: palette.style.ink, width, name: "mean" };
}

// The whole scene of a site's S-curve, for a Plot.
function scurveScene(site, { colour = state.colour, lines = curveLines(site), thin = false, hovers = true, axis = axisOfSite(site), y = site.drawn.axes[state.scale].y } = {}) {
  return {
    x: axis,
    y: new Axis(...y),
    xlabel: xLabel(axis),
    ylabel: "output y, before the affine step",
    paint: [PAINTED[colour](site), paintPicks(site, thin ? 2.6 : 4.4)],
    levels: (site.bound === null ? [] : [site.bound, -site.bound]).map((bound) => ({ y: bound, colour: palette.style.faint })),
    lines: [...(state.hidden.has("mean") ? [] : [meanLine(site, thin ? 1.2 : 2)]), ...lines, ...pinnedLines(site, axis, thin)],
    // Read when the pointer comes.
    hover: hovers && { get x() { return pointsOf(site).x; }, get y() { return pointsOf(site).y; }, text: (place) => pairText(site, pointsOf(site), place) },
  };
}

function pairText(site, { x, y, token, channel }, place) {
  const where = [token[place] < 0 ? null : tokenName(site, token[place]), channel[place] < 0 ? null : `channel ${channel[place]}`];
  const sigma = token[place] < 0 ? "" : ` · σ ${short(numbersOf(site.drawn.shown.sigma)[token[place]])}`;
  const kept = keptOfDrawn(site, token[place]);
  return [where.filter(Boolean).join(" · "), `x ${number(x[place])} · y ${number(y[place])}${sigma}`, ...(kept ? [keptName(site, kept)] : [])];
}

function tokenName(site, place) {
  const [sample, position] = [numbersOf(site.drawn.shown.sample)[place], numbersOf(site.drawn.shown.position)[place]];
  return sample < 0 ? `token ${position} of its batch` : `sample ${sample}, token ${position}`;
}

function pickName(pick) {
  const [kind, key] = pick.split(":");
  const site = kind === "token" && PAGE.captures.flatMap(({ sites }) => sites).find((one) => placeOfToken(one, key) >= 0);
  return site ? tokenName(site, placeOfToken(site, key)) : `${kind} ${key}`;
}

function siteTitle(site) {
  return `${site.index} ${visible(site.short)}`;
}

function siteDetail(site) {
  return [visible(site.kind), `d = ${grouped(site.d)}`, site.placement && visible(site.placement)].filter(Boolean).join(" · ");
}
