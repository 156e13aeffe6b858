"use strict";
// Tens of thousands of square dots at once: pixels of a layer, as a context's own rectangles take three times as long.

// Puts a dot at each pair. `of` is the place of its colour among `colours`, of all the first where it is left out; a pair
// of no colour is left out.
function paintDots(context, plot, x, y, { size, colours, of = null, alpha = 1 }) {
  const { width, height } = plot.canvas;
  const times = width / plot.width;
  const { left, top, width: wide, height: high } = plot.box;
  const across = plot.x.pixels(x, left * times, wide * times);
  const upwards = plot.y.pixels(y, (top + high) * times, -high * times);
  const layer = context.createImageData(width, height);
  const parts = colours.map(rgbOf);
  const half = (size * times) / 2;
  for (let place = 0; place < across.length; place += 1) {
    const colour = parts[of ? of[place] : 0];
    if (colour) stamp(layer, across[place], upwards[place], half, colour, alpha);
  }
  const canvas = element("canvas", { width, height });
  canvas.getContext("2d").putImageData(layer, 0, 0);
  context.save();
  context.resetTransform();
  context.drawImage(canvas, 0, 0);
  context.restore();
}

// Lays a square over a layer's pixels, each by the share of it that the square covers.
function stamp({ data, width, height }, x, y, half, [red, green, blue], alpha) {
  const [left, right, top, bottom] = [x - half, x + half, y - half, y + half];
  const [firstColumn, lastColumn] = [Math.max(Math.floor(left), 0), Math.min(Math.ceil(right), width)];
  const [firstRow, lastRow] = [Math.max(Math.floor(top), 0), Math.min(Math.ceil(bottom), height)];
  for (let row = firstRow; row < lastRow; row += 1) {
    const high = alpha * (Math.min(row + 1, bottom) - Math.max(row, top));
    for (let column = firstColumn; column < lastColumn; column += 1) {
      const share = high * (Math.min(column + 1, right) - Math.max(column, left));
      const at = 4 * (row * width + column);
      const under = (data[at + 3] / 255) * (1 - share);
      const whole = share + under;
      if (!(whole > 0)) continue;
      data[at] = (share * red + under * data[at]) / whole;
      data[at + 1] = (share * green + under * data[at + 1]) / whole;
      data[at + 2] = (share * blue + under * data[at + 2]) / whole;
      data[at + 3] = 255 * whole;
    }
  }
}
