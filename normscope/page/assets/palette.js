"use strict";
// Colours: those of the package's figures, told apart with any colour vision, in light and in dark.

// Viridis, by Nathaniel Smith and Stéfan van der Walt (CC0), at eleven places.
const VIRIDIS = [
  [68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140], [34, 168, 132],
  [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37],
];
// From few pairs to many.
const DENSITY = { light: [[184, 184, 184], [20, 20, 20]], dark: [[110, 116, 126], [250, 250, 250]] };

const palette = {
  styles: {},
  theme: "light",
  get style() {
    return this.styles[this.theme];
  },
  // What is pinned, as the page marks what is chosen.
  get mark() {
    return { light: "#2a8cf0", dark: "#7cc0ff" }[this.theme];
  },
  curve(name) {
    return this.style.curves[name] || { colour: this.style.ink, dashes: [] };
  },
};

function between(first, second, share) {
  return first.map((value, place) => Math.round(value + share * (second[place] - value)));
}

function viridis(share) {
  const place = clipped(share, 0, 1) * (VIRIDIS.length - 1);
  const below = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return rgb(between(VIRIDIS[below], VIRIDIS[below + 1], place - below));
}

function rgb(parts) {
  return `rgb(${parts.join(",")})`;
}
