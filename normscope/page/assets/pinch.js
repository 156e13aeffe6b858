"use strict";
// Two fingers on a figure zoom and move it; one finger scrolls the page as everywhere.

function pinchable(plot) {
  const { host } = plot;
  let began = null;
  // The middle of the fingers, in shares of what is shown, and their distance.
  const fingers = ([{ clientX: x, clientY: y }, { clientX: toX, clientY: toY }]) => {
    const box = host.getBoundingClientRect();
    const { left, top, width, height } = plot.box;
    const middle = { x: ((x + toX) / 2 - box.left - left) / width, y: 1 - ((y + toY) / 2 - box.top - top) / height };
    return { ...middle, apart: Math.max(Math.hypot(x - toX, y - toY), 1) };
  };
  const listen = (name, react) => host.addEventListener(name, (event) => {
    if (event.touches.length !== 2 || !plot.box) return;
    event.preventDefault();
    react(fingers(event.touches));
  }, { passive: false });
  listen("touchstart", (now) => {
    began = { ...now, zoom: plot.zoom || WHOLE };
    plot.left();
  });
  // What lay between the fingers where they began lies between them now.
  listen("touchmove", (now) => {
    if (!began) return;
    const part = (axis) => {
      const [from, to] = began.zoom[axis];
      const length = ((to - from) * began.apart) / now.apart;
      const first = from + began[axis] * (to - from) - now[axis] * length;
      return [first, first + length];
    };
    plot.zoomTo({ x: part("x"), y: part("y") });
  });
  for (const name of ["touchend", "touchcancel"]) host.addEventListener(name, () => { began = null; });
}
