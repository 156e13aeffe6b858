"use strict";
// The page: its head, its tabs, its keys, light and dark, and what is shown in it.

const SHOWN = { overview: overviewView, site: siteView, explorer: explorerView, check: checkView, swap: swapView, training: trainingView, compare: compareView };
const KEYS = [
  ["← →", "previous site, next site"], ["1 2 …", Object.values(VIEWS).join(", ").toLowerCase()], ["/", "search tokens and channels"],
  ["d t c", "colour by density, token, channel"], ["l", "light or dark theme"], ["?", "this help"], ["Esc", "close it"],
  ["+ − 0 ← ↑ ↓ →", "in a figure: zoom in, zoom out, see all, move"], ["← ↑ ↓ → Enter", "in an input: from token to token, pin one"],
];
const MOST_NAMED = 4; // inputs, at the top of the page
const darkScreen = window.matchMedia("(prefers-color-scheme: dark)");

let shownView = null;

function render() {
  setTheme(state.theme || (darkScreen.matches ? "dark" : "light"));
  Plot.all.clear();
  refill(document.getElementById("head"), headParts());
  refill(document.getElementById("main"), SHOWN[state.view]());
  Plot.redrawAll();
  if (shownView !== null && shownView !== state.view) window.scrollTo(0, 0);
  shownView = state.view;
  if (state.view === "site" && open.site) say(siteTitle(open.site));
}

function headParts() {
  const captures = PAGE.captures.map((capture, place) => [place, captureTitle(capture)]);
  const chosen = (capture) => go({ capture: Number(capture), site: counterpart(capture, firstName()) ?? 0 });
  const choose = captures.length > 1 ? dropdown(captures, state.capture, chosen, { id: "captures", "aria-label": "Capture" }) : null;
  return [
    element("div", { class: "title" }, [
      element("h1", { text: visible(PAGE.title) }),
      element("div", { class: "group" }, [choose, button(palette.theme === "light" ? "Dark theme" : "Light theme", changeTheme, { id: "theme" }), button("Keys", help, { id: "keys", "aria-haspopup": "dialog" })]),
    ]),
    ...originOf(open.capture),
    element("nav", { "aria-label": "Parts of the page" }, Object.entries(VIEWS).map(([view, text]) => (
      button(text, () => go({ view }), { id: `tab-${view}`, "aria-current": view === state.view ? "page" : null })))),
  ];
}

function originOf(capture) {
  const { weights, data, dtype, sample } = capture.about;
  const words = [weights, data, `${grouped(capture.samples)} samples`, dtype, sample].filter(Boolean).map(visible);
  const untrained = capture.random ? warning(`These weights are not trained: ${visible(weights)}.`) : "";
  return [remark(words.join(" · ")), inputsInside(), untrained];
}

// Whoever sends the file should know that pictures, recordings or texts are in it, of whichever capture.
function inputsInside() {
  const all = PAGE.captures.flatMap(({ about, inputs }) => inputs.map(({ name, group }) => [`${about.model} ${group} ${name}`, shortly(name, 40)]));
  const names = [...new Map(all).values()];
  if (!names.length) return "";
  const few = names.length > MOST_NAMED ? [...names.slice(0, MOST_NAMED), "…"] : names;
  return element("p", { class: "note", id: "inside" }, [`This file contains ${counted(names.length, "input")}: ${few.join("; ")}. `, element("code", { text: "--keep-inputs 0" }), " leaves them out."]);
}

function setTheme(theme) {
  palette.theme = theme;
  document.documentElement.dataset.theme = theme;
}

function changeTheme() {
  go({ theme: palette.theme === "light" ? "dark" : "light" });
  render();
}

function help() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(element("h2", { id: "help-title", text: "Keys" }), card(KEYS),
    remark("In a figure: drag or pinch to zoom, double-click to see all, hover over a pair for its token and channel."),
    button("Close", () => dialog.close()));
  dialog.showModal();
}

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  if (event.target.closest("input:not([type=radio], [type=checkbox]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  // Arrows choose among radio buttons and scroll a table.
  const local = event.key.startsWith("Arrow") && event.target.closest("[type=radio], .scrolls");
  const action = local ? null : keyAction(event.key);
  if (!action) return;
  event.preventDefault();
  action();
}

function keyAction(key) {
  const view = Object.keys(VIEWS)[Number(key) - 1];
  const colour = COLOURS.find((name) => name[0] === key);
  if (view) return () => go({ view });
  if (colour) return () => { go({ colour }); render(); };
  return { ArrowLeft: () => stepSite(-1), ArrowRight: () => stepSite(1), "/": search, l: changeTheme, "?": help }[key];
}

function search() {
  if (state.view !== "site") go({ view: "site" });
  const field = document.getElementById("search");
  if (field) field.focus();
}

// Paper is white and narrow, whatever the screen is; a table is printed as small as it takes.
function printed() {
  const root = document.documentElement;
  const zoomTables = (zoomOf) => document.querySelectorAll("table").forEach((table) => { table.style.zoom = zoomOf(table); });
  let before = palette.theme;
  window.addEventListener("beforeprint", () => {
    before = palette.theme;
    root.dataset.print = "";
    setTheme("light");
    zoomTables((table) => Math.min(1, table.parentElement.clientWidth / table.offsetWidth));
    Plot.redrawAll(true);
  });
  window.addEventListener("afterprint", () => {
    delete root.dataset.print;
    setTheme(before);
    zoomTables(() => "");
    Plot.redrawAll();
  });
}

darkScreen.addEventListener("change", render);
window.addEventListener("popstate", () => { readAddress(); render(); });
document.getElementById("skip").addEventListener("click", () => document.getElementById("main").focus());
document.addEventListener("keydown", keyed);
readAddress();
render();
printed();
document.querySelector("footer").hidden = false;
document.documentElement.dataset.ready = String(Math.round(performance.now()));
