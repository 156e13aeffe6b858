"use strict";
// The places of an input: patches over its picture, frames under its waveform or spectrogram, words with a background.

const MOST_PICTURE = 400; // pixels of the longer side on the screen
const HEAT_OPACITY = 0.6;
const BEFORE = { side: 20, gap: 4 };
const WAVE = { height: 96, strip: 26 };

// A picture's pixels on a canvas of their own, in colour or, below a heat map, in grey.
const pictureOf = cached((picture, grey) => {
  const { height, width, channels } = picture;
  const pixels = numbersOf(picture.pixels);
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const { data } = image;
  const [green, blue] = channels === 1 ? [0, 0] : [1, 2];
  for (let at = 0; at < width * height; at += 1) {
    const from = channels * at;
    const light = 0.299 * pixels[from] + 0.587 * pixels[from + green] + 0.114 * pixels[from + blue];
    data[4 * at] = grey ? light : pixels[from];
    data[4 * at + 1] = grey ? light : pixels[from + green];
    data[4 * at + 2] = grey ? light : pixels[from + blue];
    data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}, String);

function paintWaveform(context, { low, high }, { x, y, width, height }) {
  const [lows, highs] = [numbersOf(low), numbersOf(high)];
  const reach = Math.max(...Array.from(highs, Math.abs), ...Array.from(lows, Math.abs)) || 1;
  context.fillStyle = palette.style.ink;
  for (let at = 0; at < lows.length; at += 1) {
    const [top, bottom] = [highs[at], lows[at]].map((value) => y + (height / 2) * (1 - value / reach));
    context.fillRect(x + (at * width) / lows.length, top, Math.max(width / lows.length, 0.7), Math.max(bottom - top, 0.7));
  }
}

// Where the places of an input lie within so much room: {width, height, picture, after, boxOf(place), placeAt(x, y)}. They
// are cells over a picture; without one, columns over a waveform or spectrogram and a strip below it.
function boxesOf(picture, { before, grid: [rows, columns] }, room) {
  const side = Math.min(BEFORE.side, room / Math.max(before, 1) - BEFORE.gap);
  const apart = side + BEFORE.gap;
  const top = before ? apart + BEFORE.gap : 0;
  const size = { width: room, height: WAVE.height };
  if (picture) {
    const [tall, wide] = picture.size;
    const zoom = Math.min(room, MOST_PICTURE) / Math.max(wide, Math.min(tall, wide * 4));
    Object.assign(size, { width: wide * zoom, height: Math.min(tall * zoom, MOST_PICTURE) });
  }
  const high = size.height + (picture || !columns ? 0 : WAVE.strip);
  const cell = { width: size.width / columns, height: high / rows };
  return {
    width: size.width, height: top + high, picture: { x: 0, y: top, ...size }, after: before * apart + BEFORE.gap,
    boxOf(place) {
      if (place < before) return { x: 1 + place * apart, y: 1, width: side - 2, height: side - 2 };
      const at = place - before;
      return { x: (at % columns) * cell.width, y: top + Math.floor(at / columns) * cell.height, ...cell };
    },
    placeAt(x, y) {
      const [row, column] = y < top ? [0, Math.floor(x / apart)] : [Math.floor((y - top) / cell.height), Math.floor(x / cell.width)];
      if (y < top) return column >= 0 && column < before ? column : -1;
      return row >= 0 && row < rows && column >= 0 && column < columns ? before + row * columns + column : -1;
    },
  };
}

// An input with its places. `rings` returns those with a ring, {place, colour}; `told` and `chosen` are called with the
// place that is pointed at, or −1, and with the one that is clicked.
class InputMap {
  constructor(site, input, kept, { other, rings, told, chosen }) {
    Object.assign(this, { site, input, kept, other, rings, told, chosen, at: -1 });
    this.shown = open.capture.inputs[input];
    this.inWords = !this.shown.picture && !this.shown.waveform;
    if (kept && kept.places.kind === "words") this.inWords = true;
    const role = kept && placesIn(kept) ? { tabindex: "0", role: "application", "aria-roledescription": "map of tokens" } : { role: "img" };
    this.host = element("div", { class: "input-map", id: "input-map", "aria-label": `${inputName(input)}: ${role.tabindex ? "arrow keys go through its tokens, Enter pins one" : "no token of this norm is a place of it"}`, ...role });
    if (this.inWords) this.spans = this.shown.words.map((word, place) => element("span", { class: "word", "data-place": place, text: shortly(word, 200) }));
    else {
      this.canvas = element("canvas", { "aria-hidden": "true" });
      this.svg = svg("svg", { "aria-hidden": "true" });
      this.host.append(this.canvas, this.svg);
    }
    if (role.tabindex) this.listen();
    Plot.add(this);
  }

  listen() {
    const point = (event) => this.point(this.placeOf(event));
    this.host.addEventListener("pointermove", point);
    this.host.addEventListener("pointerleave", () => this.point(-1));
    this.host.addEventListener("blur", () => this.point(-1));
    this.host.addEventListener("click", (event) => {
      const place = this.placeOf(event);
      if (place >= 0) this.chosen(place);
    });
    this.host.addEventListener("keydown", (event) => this.keyed(event));
  }

  placeOf(event) {
    if (this.inWords) {
      const word = event.target.closest(".word");
      return word ? Number(word.dataset.place) : -1;
    }
    const box = this.host.getBoundingClientRect();
    return this.boxes.placeAt(event.clientX - box.left, event.clientY - box.top);
  }

  point(place) {
    if (place === this.at) return;
    this.at = place;
    this.told(place);
  }

  keyed(event) {
    const last = placesIn(this.kept) - 1;
    const far = this.kept.places.kind === "patches" ? this.kept.places.grid[1] : 10;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: far, ArrowUp: -far, Home: -Infinity, End: Infinity }[event.key];
    const pinned = pinnedAt(this.site);
    const from = this.at >= 0 || !pinned || pinned.input !== this.input ? this.at : placeOfKept(this.kept, pinned.token).place;
    if (by) this.point(clipped(from < 0 ? 0 : from + by, 0, last));
    else if ((event.key === "Enter" || event.key === " ") && from >= 0) this.chosen(from);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  tokenOf(place) {
    return tokenOfPlace(this.kept, place, this.other);
  }

  draw(width = this.host.clientWidth) {
    if (!width) return;
    this.width = width;
    const heat = this.kept && placesIn(this.kept) ? heatOf(this.site, this.input, this.kept) : null;
    if (this.inWords) this.drawWords(heat);
    else this.drawBoxes(heat);
    this.ring();
  }

  drawWords(heat) {
    const sigma = this.kept && this.kept.places.kind ? numbersOf(this.kept.sigma) : [];
    const last = sigma.length ? this.spans.findLastIndex((_, place) => !Number.isNaN(sigma[this.tokenOf(place)])) : this.spans.length - 1;
    this.spans.forEach((span, place) => {
      const colour = this.kept ? heatColour(heat, this.tokenOf(place)) : null;
      span.style.background = colour || "";
      span.style.color = colour ? inkOn(colour) : "";
    });
    const left = this.spans.length - 1 - last;
    this.host.replaceChildren(...this.spans.slice(0, last + 1), left ? element("span", { class: "note", text: `and ${grouped(left)} of padding` }) : "");
  }

  drawBoxes(heat) {
    const places = this.kept ? this.kept.places : { kind: "", grid: [0, 0], before: 0 };
    const { picture, waveform } = this.shown;
    const inTime = waveform && !(picture && places.kind === "patches");
    this.boxes = boxesOf(inTime || picture.along_width ? null : picture, places, this.width);
    const { width, height, picture: at, after } = this.boxes;
    Object.assign(this.svg.style, { width: `${width}px`, height: `${height}px` });
    this.host.style.height = `${height}px`;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const context = sizedContext(this.canvas, width, height);
    if (inTime) paintWaveform(context, waveform, at);
    else {
      // A handful of pixels is seen better with their edges.
      context.imageSmoothingEnabled = Math.max(at.width / picture.width, at.height / picture.height) < 8;
      context.imageSmoothingQuality = "high";
      context.drawImage(pictureOf(picture, Boolean(heat) && places.kind === "patches"), at.x, at.y, at.width, at.height);
    }
    this.label = places.before ? lettering({ x: after, y: 15 }, places.kind ? "of no patch" : "the whole input") : null;
    for (let place = 0; place < placesIn({ places }); place += 1) this.fill(context, place, heat);
  }

  fill(context, place, heat) {
    const { before, kind } = this.kept.places;
    const box = this.boxes.boxOf(place);
    const colour = heatColour(heat, this.tokenOf(place));
    if (place < before) {
      context.strokeStyle = palette.style.faint;
      context.strokeRect(box.x, box.y, box.width, box.height);
    }
    if (!colour) return;
    const [x, right] = [box.x, box.x + box.width].map(Math.round);
    const top = kind === "frames" && place >= before ? box.y + WAVE.height : box.y;
    const [y, bottom] = [top, box.y + box.height].map(Math.round);
    context.globalAlpha = kind === "patches" && place >= before ? HEAT_OPACITY : 1;
    context.fillStyle = colour;
    context.fillRect(x, y, Math.max(right - x, 1), bottom - y);
    context.globalAlpha = 1;
  }

  ring() {
    const marked = this.rings();
    if (this.inWords) {
      this.spans.forEach((span, place) => {
        const ring = marked.find((one) => one.place === place);
        span.style.outlineColor = ring ? ring.colour : "";
        span.classList.toggle("ringed", Boolean(ring));
      });
      return;
    }
    if (!this.boxes) return;
    const rings = marked.reverse().flatMap(({ place, colour }) => {
      const box = this.boxes.boxOf(place);
      const wide = Math.max(box.width, 4);
      const around = { x: box.x - (wide - box.width) / 2, y: box.y, width: wide, height: box.height, fill: "none", rx: 1.5 };
      return [svg("rect", { ...around, stroke: palette.style.background, "stroke-width": 5 }), svg("rect", { ...around, stroke: colour, "stroke-width": 2.4, "data-ring": place })];
    });
    this.svg.replaceChildren(...(this.label ? [this.label] : []), ...rings);
  }
}

// Black or white, whichever is read better on a colour, rgb(…) (WCAG's relative luminance).
function inkOn(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}
