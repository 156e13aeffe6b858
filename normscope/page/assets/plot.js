"use strict";
// A figure in the page: points and densities on a canvas, lines and letters above it as SVG; zoom, hover, save.

const SVG = "http://www.w3.org/2000/svg";
const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const LETTERS = 12;
const NEAR = 24; // pixels, from which a point answers
const LEAST_DRAGGED = 8; // pixels, each way
const WHOLE = { x: [0, 1], y: [0, 1] }; // shares of the axes that are shown
const LEAST_SHOWN = 1e-4; // of an axis
const KEY = { title: 26, row: 18, gap: 10, swatch: 26, letter: 7 }; // pixels
let clips = 0;

function svg(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function lettering(attributes, text) {
  return svg("text", { fill: palette.style.ink, "font-size": LETTERS, "font-family": FONT, ...attributes }, text);
}

function lineName(name) {
  return name === "mean" ? "E[y|x]" : name;
}

function dashed(dashes, times) {
  return dashes.map((dash) => dash * times).join(" ") || null;
}

// Sizes a canvas for the screen's pixels; returns its context, in pixels of the page.
function sizedContext(canvas, width, height) {
  const dots = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * dots), height: Math.round(height * dots) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(dots, dots);
  return context;
}

class Plot {
  // `scene` is a function of this plot that returns what is drawn:
  // {x, y: Axis, xlabel, ylabel, paint: [function of (context, plot)], lines, bands, marks, levels, hover}.
  // Without a height, in pixels, its style is `size`.
  constructor(host, { label, scene, height = null, size = "", title = "", zooms = true, open = null }) {
    Object.assign(this, { host, label, scene, title, open, small: size === "small" });
    this.zoom = null;
    this.traces = [];
    this.pointed = null; // is told which point is pointed at, −1 for none
    this.clip = `clip-${(clips += 1)}`;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.svg = svg("svg", { role: "img", "aria-label": label });
    this.tip = element("div", { class: "tip", hidden: "" });
    host.replaceChildren(this.canvas, this.svg, this.tip);
    host.className = `plot ${size}`;
    if (height) host.style.height = `${height}px`;
    host.addEventListener("pointermove", (event) => this.moved(event));
    host.addEventListener("pointerleave", () => this.left());
    host.addEventListener("click", (event) => this.clicked(event));
    if (zooms) this.zoomable();
    Plot.add(this);
  }

  // Draws a view, {host, draw}, when it is nearly in sight, a frame later if it is for `later`; again when its width changes.
  static add(view) {
    Plot.all.set(view.host, view);
    sizes.observe(view.host);
  }

  // Draws again what is in sight, or `every` view; the others follow when they come near.
  static redrawAll(every = false) {
    for (const host of Plot.all.keys()) if (!host.isConnected) Plot.all.delete(host);
    // All sizes are read before anything is written: the browser lays the page out once.
    const places = [...Plot.all.keys()].map((host) => [host, host.getBoundingClientRect(), host.clientWidth, host.clientHeight]);
    for (const [host, { top, bottom }, width, height] of places) {
      sight.unobserve(host);
      const view = Plot.all.get(host);
      if (every || (top < window.innerHeight && bottom >= 0 && !view.later)) view.draw(width, height);
      else sight.observe(host);
    }
  }

  draw(width = this.host.clientWidth, high = this.host.clientHeight) {
    if (!width) return;
    Object.assign(this, { width, high, shown: this.scene(this) });
    const edge = this.small ? { left: 2, right: 2, top: 2, bottom: 2 } : { left: 54, right: 12, top: 8, bottom: this.shown.xlabel ? 42 : 24 };
    this.box = { left: edge.left, top: edge.top, width: width - edge.left - edge.right, height: high - edge.top - edge.bottom };
    const { x, y } = this.zoom || WHOLE;
    this.x = this.shown.x.part(...x);
    this.y = this.shown.y.part(...y);
    this.paint();
    this.write();
  }

  across(value) {
    return this.box.left + this.x.share(value) * this.box.width;
  }

  upwards(value) {
    return this.box.top + (1 - this.y.share(value)) * this.box.height;
  }

  paint() {
    const context = sizedContext(this.canvas, this.width, this.high);
    const { left, top, width, height } = this.box;
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    for (const painted of this.shown.paint || []) painted(context, this);
  }

  write() {
    const { left, top, width, height } = this.box;
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.high);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.high}`);
    const clip = svg("clipPath", { id: this.clip });
    clip.append(svg("rect", { x: left, y: top, width, height }));
    const inside = svg("g", { "clip-path": `url(#${this.clip})`, fill: "none" });
    this.svg.replaceChildren(clip, ...(this.small ? [] : [svg("desc", {}, this.description()), ...this.framed()]), inside);
    for (const band of this.shown.bands || []) inside.append(this.band(band));
    for (const level of this.shown.levels || []) inside.append(this.level(level));
    for (const line of this.shown.lines || []) inside.append(...this.line(line));
    for (const mark of this.shown.marks || []) inside.append(this.mark(mark));
    [this.traced, this.pointer] = [svg("g"), svg("g", { "pointer-events": "none" })];
    inside.append(this.traced, this.pointer);
    this.trace(this.traces);
  }

  // The axes, and the lowest and the highest point of each named line, for readers who do not see them.
  description() {
    const { xlabel, ylabel, names = short, lines = [] } = this.shown;
    const points = new Map();
    for (const { name, x, y } of lines.filter((line) => line.name)) {
      const shown = Array.from(y, (value, place) => [value, x[place]]).filter(([value, at]) => Number.isFinite(value) && at >= this.x.low && at <= this.x.high);
      points.set(name, [...(points.get(name) || []), ...shown].sort(([one], [other]) => one - other));
    }
    const said = ([value, x]) => `${short(value)} at ${names(x)}`;
    const extremes = [...points].filter(([, [first]]) => first).map(([name, sorted]) => `${lineName(name)}: lowest ${said(sorted[0])}, highest ${said(sorted.at(-1))}`);
    return [`${ylabel || this.title} against ${xlabel}`, ...extremes].join(". ");
  }

  // Lines that come and go above the others.
  trace(lines) {
    this.traces = lines;
    if (this.traced) this.traced.replaceChildren(...lines.flatMap((line) => this.line(line)));
  }

  framed() {
    const { left, top, width, height } = this.box;
    const { faint } = palette.style;
    const parts = [svg("path", { d: `M${left} ${top}V${top + height}H${left + width}`, stroke: faint, fill: "none" })];
    for (const tick of this.x.ticks(width, TICK_PIXELS.across)) {
      const at = this.across(tick);
      parts.push(svg("path", { d: `M${at} ${top + height}v4`, stroke: faint }));
      const label = this.shown.names ? this.shown.names(tick) : number(tick);
      parts.push(lettering({ x: at, y: top + height + 17, "text-anchor": "middle", "data-tick": "x" }, label));
    }
    for (const tick of this.y.ticks(height, TICK_PIXELS.upwards)) {
      const at = this.upwards(tick);
      parts.push(svg("path", { d: `M${left} ${at}h${width}`, stroke: faint, "stroke-opacity": 0.18 }));
      parts.push(lettering({ x: left - 7, y: at + 4, "text-anchor": "end" }, number(tick)));
    }
    const middle = top + height / 2;
    if (this.shown.xlabel) parts.push(lettering({ x: left + width / 2, y: top + height + 35, "text-anchor": "middle" }, this.shown.xlabel));
    if (this.shown.ylabel) parts.push(lettering({ x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, this.shown.ylabel));
    return parts;
  }

  path(x, y) {
    let text = "";
    let pen = false;
    for (let place = 0; place < x.length; place += 1) {
      const here = Number.isFinite(y[place]) && Number.isFinite(x[place]);
      if (here) text += `${pen ? "L" : "M"}${this.across(x[place]).toFixed(1)} ${clipped(this.upwards(y[place]), -1e4, 1e4).toFixed(1)}`;
      pen = here;
    }
    return text;
  }

  line({ x, y, colour, dashes = [], width = 2, halo = true, name = null, opacity = null }) {
    const d = this.path(x, y);
    const under = svg("path", { d, stroke: palette.style.background, "stroke-width": width + 1.5, "stroke-opacity": 0.75 });
    const over = svg("path", {
      d, stroke: colour, "stroke-width": width, "stroke-dasharray": dashed(dashes, width * 1.3),
      "stroke-linejoin": "round", "data-line": name, "stroke-opacity": opacity,
    });
    return halo ? [under, over] : [over];
  }

  band({ x, low, high, colour, opacity = 0.35 }) {
    const above = this.path(x, high);
    const below = this.path(Array.from(x).reverse(), Array.from(low).reverse()).replace("M", "L");
    return svg("path", { d: `${above}${below}Z`, fill: colour, "fill-opacity": opacity, "data-line": "band" });
  }

  level({ y = null, x = null, colour, dashes = "2 4" }) {
    const { left, top, width, height } = this.box;
    const d = y === null ? `M${this.across(x)} ${top}v${height}` : `M${left} ${this.upwards(y)}h${width}`;
    return svg("path", { d, stroke: colour, "stroke-width": 1.2, "stroke-dasharray": dashes || null });
  }

  // A marker at a place: circle, square, diamond, triangle, and so on by its number.
  mark({ x, y, colour, shape = 0, size = 4, name = null }) {
    const [at, up] = [this.across(x), this.upwards(y)];
    const shapes = [
      `M${at - size} ${up}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0`,
      `M${at - size} ${up - size}h${2 * size}v${2 * size}h${-2 * size}z`,
      `M${at} ${up - 1.4 * size}l${1.4 * size} ${1.4 * size}l${-1.4 * size} ${1.4 * size}l${-1.4 * size} ${-1.4 * size}z`,
      `M${at} ${up - 1.3 * size}l${1.3 * size} ${2.3 * size}h${-2.6 * size}z`,
      `M${at} ${up + 1.3 * size}l${1.3 * size} ${-2.3 * size}h${-2.6 * size}z`,
    ];
    return svg("path", { d: shapes[shape % shapes.length], fill: colour, stroke: palette.style.background, "data-mark": name });
  }

  // The point that is nearest to the pointer: along x alone where the points have no y; −1 where none is near.
  nearest(event) {
    if (!this.shown || !this.shown.hover) return -1;
    const { x, y } = this.shown.hover;
    const box = this.host.getBoundingClientRect();
    const [atX, atY] = [event.clientX - box.left, event.clientY - box.top];
    let [best, found] = [y ? NEAR * NEAR : Infinity, -1];
    for (let place = 0; place < x.length; place += 1) {
      const away = (this.across(x[place]) - atX) ** 2 + (y ? (this.upwards(y[place]) - atY) ** 2 : 0);
      if (away < best) [best, found] = [away, place];
    }
    return found;
  }

  moved(event) {
    if (this.dragged) return this.drag(event);
    const found = this.nearest(event);
    return found < 0 ? this.left() : this.point(found);
  }

  point(found) {
    const { x, y, text } = this.shown.hover;
    const [at, up] = [this.across(x[found]), y ? this.upwards(y[found]) : null];
    const { ink, background } = palette.style;
    const ring = up === null ? [this.level({ x: x[found], colour: ink, dashes: "" })] : [
      svg("circle", { cx: at, cy: up, r: 6, stroke: background, "stroke-width": 4 }),
      svg("circle", { cx: at, cy: up, r: 6, stroke: ink, "stroke-width": 1.8 }),
    ];
    this.pointer.replaceChildren(...ring);
    this.tip.replaceChildren(...text(found).map((line) => element("div", { text: line })));
    this.tip.hidden = false;
    const right = at > this.width / 2;
    this.tip.style.left = right ? "auto" : `${Math.min(at + 14, this.width - 40)}px`;
    this.tip.style.right = right ? `${this.width - at + 14}px` : "auto";
    this.tip.style.top = `${Math.max((up === null ? this.box.top : up - 20), 0)}px`;
    this.host.classList.toggle("opens", Boolean(this.open));
    if (this.pointed) this.pointed(found);
  }

  left() {
    if (this.pointed && !this.tip.hidden) this.pointed(-1);
    this.tip.hidden = true;
    if (this.pointer) this.pointer.replaceChildren();
  }

  clicked(event) {
    if (this.justZoomed) return;
    const found = this.open ? this.nearest(event) : -1;
    if (found >= 0) this.open(found);
    else this.moved(event); // a finger hovers nowhere
  }

  zoomable() {
    this.host.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType !== "mouse") return;
      this.host.setPointerCapture(event.pointerId);
      this.dragged = this.offset(event);
    });
    this.host.addEventListener("dblclick", () => {
      this.zoom = null;
      this.draw();
    });
    this.host.addEventListener("pointerup", (event) => this.drop(event));
    pinchable(this);
    this.svg.setAttribute("tabindex", 0);
    this.host.addEventListener("keydown", (event) => this.keyed(event));
    this.host.title = "Drag, pinch, or press + and − to zoom; double-click or press 0 to see all";
  }

  // + and − zoom about the middle, arrows move a part that is shown, 0 shows all.
  keyed(event) {
    const { key, ctrlKey, metaKey, altKey } = event;
    const times = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity }[key] || 1;
    const [right, up] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[key] || [0, 0];
    const moves = this.zoom && (right || up);
    if (ctrlKey || metaKey || altKey || (times === 1 && !moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const part = ([from, to], by) => {
      const [middle, half] = [(from + to) / 2 + (by * (to - from)) / 4, Math.min(times * (to - from), 1) / 2];
      return [middle - half, middle + half];
    };
    const { x, y } = this.zoom || WHOLE;
    this.zoomTo({ x: part(x, right), y: part(y, up) });
  }

  offset(event) {
    const box = this.host.getBoundingClientRect();
    const { left, top, width, height } = this.box;
    return [clipped(event.clientX - box.left, left, left + width), clipped(event.clientY - box.top, top, top + height)];
  }

  drag(event) {
    const [[x, y], [toX, toY]] = [this.dragged, this.offset(event)];
    const box = { x: Math.min(x, toX), y: Math.min(y, toY), width: Math.abs(x - toX), height: Math.abs(y - toY) };
    this.tip.hidden = true;
    this.pointer.replaceChildren(svg("rect", { ...box, stroke: palette.style.ink, fill: palette.style.ink, "fill-opacity": 0.1 }));
  }

  drop(event) {
    const from = this.dragged;
    [this.dragged, this.justZoomed] = [null, false];
    if (!from) return;
    const { left, top, width, height } = this.box;
    const [[x, y], [toX, toY]] = [from, this.offset(event)];
    if (Math.min(Math.abs(x - toX), Math.abs(y - toY)) < LEAST_DRAGGED) return;
    const shown = this.zoom || WHOLE;
    const part = ([begin, end], shares) => extent(shares.map((share) => begin + share * (end - begin)));
    this.justZoomed = true;
    this.zoomTo({
      x: part(shown.x, [x, toX].map((at) => (at - left) / width)),
      y: part(shown.y, [y, toY].map((at) => 1 - (at - top) / height)),
    });
  }

  // Shows a part of each axis, in shares of it: never more than there is to see, nor too little for its numbers.
  zoomTo({ x, y }) {
    const [across, upwards] = [x, y].map(([from, to]) => {
      const length = clipped(to - from, LEAST_SHOWN, 1);
      const first = clipped(from, 0, 1 - length);
      return [first, first + length];
    });
    const all = [...across, ...upwards].join() === "0,1,0,1";
    this.zoom = all ? null : { x: across, y: upwards };
    this.draw();
  }

  // Rows of named lines for a figure by itself, and their height: on the page the buttons above it are its key.
  key() {
    const lines = [...new Map((this.shown.lines || []).filter(({ name }) => name).map((line) => [line.name, line])).values()];
    const parts = [];
    let [x, y] = [Infinity, KEY.title - KEY.row];
    for (const { name, colour, dashes = [] } of lines.length > 1 ? lines : []) {
      const text = lineName(name);
      const width = KEY.swatch + KEY.letter * text.length + 2 * KEY.gap;
      if (x + width > this.width) [x, y] = [KEY.gap, y + KEY.row];
      const stroke = name === "pinned" ? palette.mark : colour;
      parts.push(svg("path", { d: `M${x} ${y + 6}h${KEY.swatch}`, stroke, "stroke-width": 2.4, "stroke-dasharray": dashed(dashes, 2) }));
      parts.push(lettering({ x: x + KEY.swatch + 5, y: y + 10 }, text));
      x += width;
    }
    return { parts, height: y + KEY.row };
  }

  // The figure by itself, with its title and its key above it, as the text of an SVG file.
  asSvg() {
    const { parts, height: above } = this.key();
    const size = { width: this.width, height: this.high + above };
    const drawn = svg("g", { transform: `translate(0 ${above})` });
    drawn.append(svg("image", { href: this.canvas.toDataURL("image/png"), width: this.width, height: this.high }));
    for (const part of this.svg.children) drawn.append(part.cloneNode(true));
    const whole = svg("svg", { xmlns: SVG, viewBox: `0 0 ${size.width} ${size.height}`, ...size });
    const title = lettering({ x: 10, y: KEY.title - 8, "font-size": LETTERS + 1, "font-weight": 600 }, this.title || this.label);
    whole.append(svg("title", {}, this.label), svg("rect", { ...size, fill: palette.style.background }), ...parts, title, drawn);
    return new XMLSerializer().serializeToString(whole);
  }

  async save(kind) {
    const text = new Blob([this.asSvg()], { type: "image/svg+xml" });
    download(kind === "svg" ? text : await asPng(text, 2), this.title || this.label, kind);
  }
}

Plot.all = new Map(); // a view by its host
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const view = Plot.all.get(target);
    if (view && view.width && view.width !== target.clientWidth) view.draw();
  }
});
// Each in a task of its own after a frame, so that what is in sight is painted first.
const sight = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter(({ isIntersecting }) => isIntersecting)) {
    sight.unobserve(target);
    const draw = () => { if (target.isConnected && Plot.all.has(target)) Plot.all.get(target).draw(); };
    requestAnimationFrame(() => setTimeout(draw));
  }
}, { rootMargin: "300px" });

// An SVG file as PNG, so many times as large.
async function asPng(text, times) {
  const picture = new Image();
  picture.src = URL.createObjectURL(text);
  await picture.decode();
  URL.revokeObjectURL(picture.src);
  const canvas = element("canvas", { width: picture.width * times, height: picture.height * times });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}
