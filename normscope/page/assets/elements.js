"use strict";
// Elements of the page. Text goes in as text: no name and no data is ever read as markup.

const WIDE = 44; // letters, from which a cell is broken into lines

function element(name, attributes = {}, children = []) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(text, onclick, attributes = {}) {
  return element("button", { type: "button", text, onclick, ...attributes });
}

function remark(text) {
  return element("p", { class: "note", text });
}

function warning(text) {
  return element("p", { class: "warning", text });
}

// A part of the page under its heading; with an id, the heading names it.
function section(level, title, parts, id = null) {
  return element("section", { "aria-labelledby": id }, [element(level, { id, text: title }), ...parts]);
}

// A list to choose one of [value, text] from.
function dropdown(options, chosen, changed, attributes) {
  const select = element("select", attributes, options.map(([value, text]) => element("option", { value, text, selected: value === chosen })));
  select.addEventListener("change", () => changed(select.value));
  return select;
}

// A button that is on or off; `changed` is told which.
function toggle(text, on, changed, { colour = null, dashes = [], title = null } = {}) {
  const made = element("button", { type: "button", "aria-pressed": String(on), title });
  if (colour) made.append(swatch(colour, dashes));
  made.append(text);
  made.addEventListener("click", () => {
    const now = made.getAttribute("aria-pressed") !== "true";
    made.setAttribute("aria-pressed", String(now));
    changed(now);
  });
  return made;
}

function swatch(colour, dashes) {
  const line = svg("svg", { width: 26, height: 10, "aria-hidden": "true" });
  line.append(svg("path", { d: "M1 5H25", stroke: colour, "stroke-width": 3, "stroke-dasharray": dashed(dashes, 2) }));
  return line;
}

// One of several: radio buttons that look like one row.
function choice(label, options, chosen, changed) {
  const name = `choice-${label.replace(/\W/g, "-")}-${Math.random().toString(36).slice(2)}`;
  const parts = Object.entries(options).map(([value, text]) => {
    const input = element("input", { type: "radio", name, value, checked: value === chosen, onchange: () => changed(value) });
    return element("label", {}, [input, element("span", { text })]);
  });
  return element("fieldset", { class: "choice" }, [element("legend", { text: label }), ...parts]);
}

// A table, and beside it buttons that copy and save it as CSV. A cell is text, or {text, value, node}.
function table(name, heads, rows, { caption = "", chosen = -1 } = {}) {
  const cell = (kind) => (content, place) => {
    const { text, node = null } = content !== null && typeof content === "object" ? content : { text: content };
    const shape = place && isNumber(text) ? "number" : String(text).length > WIDE ? "wide" : null;
    const made = element(kind, { class: shape, scope: kind === "th" ? "col" : null });
    made.append(node || visible(text ?? "–"));
    return made;
  };
  const head = element("thead", {}, [element("tr", {}, heads.map((text, place) => {
    const made = cell("th")(text, 0);
    const first = rows.length ? rows[0][place] : "";
    if (place && isNumber(first !== null && typeof first === "object" ? first.text : first)) made.className = "number";
    return made;
  }))]);
  const body = element("tbody", {}, rows.map((row, place) => element("tr", { "aria-current": place === chosen ? "true" : null }, row.map(cell("td")))));
  const text = () => csv([heads, ...rows]);
  const tools = element("p", { class: "tools" }, [
    button("Copy CSV", () => copied(text(), `${name} copied as CSV`)),
    button("Save CSV", () => download(new Blob([text()], { type: "text/csv" }), `${name.replace(/[^\w.]+/g, "-")}.csv`)),
  ]);
  const whole = element("table", {}, [element("caption", { class: "unseen", text: name }), head, body]);
  const scrolls = element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": name }, [whole]);
  return element("div", { class: "tabled" }, [scrolls, caption ? remark(caption) : null, tools]);
}

function isNumber(text) {
  return /^[−-]?[\d.,∞]+( ?[×%]|e[−+]?\d+)?( .*)?$|^–$/.test(String(text));
}

// A table as CSV, with the numbers as they are where a cell knows them; a text that a spreadsheet would run is quoted.
function csv(rows) {
  return rows.map((row) => row.map((content) => {
    const value = content !== null && typeof content === "object" ? content.value ?? content.text : content;
    if (typeof value === "number") return String(value);
    const text = String(value ?? "");
    const safe = /^[=+@\t\r-]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }).join(",")).join("\n");
}

function say(text) {
  document.getElementById("said").textContent = text;
}

function copied(text, done) {
  const byHand = () => {
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    say(worked ? done : "This browser lets no page copy; save it instead");
  };
  if (!navigator.clipboard) return byHand();
  return navigator.clipboard.writeText(text).then(() => say(done), byHand);
}

function download(content, name) {
  const address = URL.createObjectURL(content);
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  say(`${name} saved`);
}

// A figure with its heading, what it shows in words, and the buttons that save it.
function figure(plotOptions, { heading, note = "" }) {
  const host = element("div");
  const plot = new Plot(host, { title: heading, ...plotOptions });
  const tools = element("p", { class: "tools" }, [
    button("SVG", () => plot.save("svg"), { "aria-label": `Save ${heading} as SVG` }),
    button("PNG", () => plot.save("png"), { "aria-label": `Save ${heading} as PNG` }),
  ]);
  const caption = element("figcaption", {}, [element("h3", { text: heading }), tools]);
  const whole = element("figure", {}, [caption, host, ...(note ? [remark(note)] : [])]);
  return { whole, plot };
}
