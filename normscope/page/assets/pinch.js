"use strict";
// Two fingers on a figure zoom and move it; one finger scrolls the page as everywhere.

const MOST_PINCHED = 1e4; // times, that a figure is magnified

function pinchable(plot) {
  const { host } = plot;
  let pinch = null;
  let waits = false;
  const fingers = ({ touches }) => {
    const box = host.getBoundingClientRect();
    const [[x, y], [toX, toY]] = [touches[0], touches[1]].map(({ clientX, clientY }) => [clientX - box.left, clientY - box.top]);
    return { x: (x + toX) / 2, y: (y + toY) / 2, apart: Math.max(Math.hypot(x - toX, y - toY), 1) };
  };
  host.addEventListener("touchstart", (event) => {
    if (event.touches.length !== 2 || !plot.box) return;
    event.preventDefault();
    pinch = { ...fingers(event), axes: { x: plot.x, y: plot.y } };
    plot.left();
  }, { passive: false });
  host.addEventListener("touchmove", (event) => {
    if (!pinch || event.touches.length !== 2) return;
    event.preventDefault();
    pinch.now = fingers(event);
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      if (pinch && pinch.now) zoomTo(plot, pinch);
    });
  }, { passive: false });
  const end = () => { pinch = null; };
  host.addEventListener("touchend", end);
  host.addEventListener("touchcancel", end);
}

// What lay between the fingers where they began lies between them now; never more than there is to see.
function zoomTo(plot, { x, y, apart, axes, now }) {
  const { left, top, width, height } = plot.box;
  const times = now.apart / apart;
  const ends = (axis, whole, began, here) => {
    const [low, high] = [whole.low, whole.high].map((end) => axis.share(end));
    const length = Math.min(1 / times, high - low);
    const first = began - here * length;
    const from = clipped(first, low, high - length);
    return [from, from + length].map((share) => axis.value(share));
  };
  const across = ends(axes.x, plot.shown.x, (x - left) / width, (now.x - left) / width);
  const upwards = ends(axes.y, plot.shown.y, 1 - (y - top) / height, 1 - (now.y - top) / height);
  const least = (plot.shown.x.share(across[1]) - plot.shown.x.share(across[0])) * MOST_PINCHED;
  if (least < 1) return;
  const all = plot.shown.x.share(across[0]) < 1e-6 && plot.shown.x.share(across[1]) > 1 - 1e-6;
  plot.zoom = all && plot.shown.y.share(upwards[1]) - plot.shown.y.share(upwards[0]) > 1 - 1e-6 ? null : { x: across, y: upwards };
  plot.draw();
}
