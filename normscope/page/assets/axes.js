"use strict";
// An axis: from numbers to pixels and back, linear, logarithmic, or asinh, which is linear about zero; and its ticks.

const TICK_PIXELS = { across: 62, upwards: 28 };

class Axis {
  // `linear` is the half-width of the part about zero on which an asinh axis is nearly linear; `beyond`, of pairs in words.
  constructor(low, high, { linear = null, logarithmic = false, whole = false, beyond = "" } = {}) {
    Object.assign(this, { low, high, linear, logarithmic, whole, beyond });
    this.begin = this.along(low);
    this.length = this.along(high) - this.begin || 1;
  }

  along(value) {
    if (this.logarithmic) return Math.log(value);
    return this.linear ? Math.asinh(value / this.linear) : value;
  }

  // 0 at its beginning, 1 at its end.
  share(value) {
    return (this.along(value) - this.begin) / this.length;
  }

  value(share) {
    const along = this.begin + share * this.length;
    if (this.logarithmic) return Math.exp(along);
    return this.linear ? this.linear * Math.sinh(along) : along;
  }

  within(low, high) {
    return new Axis(low, high, this);
  }

  // A part of it, between two shares.
  part(from, to) {
    return from === 0 && to === 1 ? this : this.within(this.value(from), this.value(to));
  }

  evenly(count) {
    return Float64Array.from({ length: count }, (_, place) => this.value(place / (count - 1)));
  }

  // Round numbers whose labels have room on so many pixels.
  ticks(pixels, apart) {
    const many = Math.max(2, Math.floor(pixels / apart));
    if (!this.linear && !this.logarithmic) return roundNumbers(this.low, this.high, many, this.whole);
    const kept = [];
    for (const tick of decades(this.low, this.high, this.linear)) {
      if (kept.every((other) => Math.abs(this.share(tick) - this.share(other)) * pixels >= apart)) kept.push(tick);
    }
    return kept.length > 1 ? kept.sort((one, other) => one - other) : roundNumbers(this.low, this.high, many, this.whole);
  }
}

function roundNumbers(low, high, many, whole) {
  const rough = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [1, 2, 5, 10].map((digit) => digit * power);
  const first = steps.findIndex((size) => size >= rough * 0.999);
  // One tick alone says no scale; the next finer step may be a little too close.
  const alone = Math.floor(high / steps[first]) - Math.ceil(low / steps[first]) < 1;
  let step = steps[alone && first ? first - 1 : first];
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + 1e-9 * step && ticks.length < 50; count += 1) {
    ticks.push(Number((count * step).toPrecision(12)));
  }
  return ticks;
}

// Zero and round numbers to either side of it, those that matter most first.
function decades(low, high, least) {
  const most = Math.max(Math.abs(low), Math.abs(high));
  const from = least || Math.min(Math.abs(low), Math.abs(high));
  const powers = [];
  for (let power = Math.floor(Math.log10(most)); power >= Math.floor(Math.log10(from)); power -= 1) powers.push(power);
  const sizes = [1, 5, 2].flatMap((digit) => powers.map((power) => Number(`${digit}e${power}`)));
  const largest = sizes.filter((size) => size <= most && sizes[0] === size);
  const signed = [...largest, ...sizes].flatMap((size) => (size < from ? [] : [size, -size]));
  return [...(least ? [0] : []), ...new Set(signed)].filter((tick) => tick >= low && tick <= high);
}

// Limits that hold all of some numbers, with a margin; of positive ones over more than a factor of `times`, by factors.
function axisOf(values, { times = 8, whole = false, zero = false } = {}) {
  const finite = values.filter((value) => Number.isFinite(value));
  let low = Math.min(...finite);
  let high = Math.max(...finite);
  if (!finite.length) return new Axis(0, 1);
  if (zero) low = Math.min(low, 0);
  if (low > 0 && high > times * low) return new Axis(low / 1.25, high * 1.25, { logarithmic: true });
  if (zero && low === 0 && high === 0) return new Axis(0, 1, { whole });
  if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const margin = 0.07 * (high - low);
  return new Axis(zero && low === 0 ? 0 : low - margin, high + margin, { whole });
}
