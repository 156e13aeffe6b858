"use strict";
// Elements of the page. Text goes in as text: no name and no data is ever read as markup.

const WIDE = 44; // letters, from which a cell is broken into lines
const NUMBER = /^[−-]?[\d.,∞]+( ?[×%]|e[−+]?\d+)?( .*)?$|^–$/;

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

// Pairs of a name and a text, as a list; a third text is the name's tooltip.
function card(pairs) {
  const lines = pairs.flatMap(([name, text, title]) => [element("dt", { text: visible(name), title: title || null }), element("dd", { text: visible(text) })]);
  return element("dl", { class: "card" }, lines);
}

// A part of the page under its heading; with an id, the heading names it.
function section(level, title, parts, id = null) {
  return element("section", { "aria-labelledby": id }, [element(level, { id, text: title }), ...parts]);
}

// A list to choose one of [value, text, tooltip] from.
function dropdown(options, chosen, changed, attributes) {
  const select = element("select", attributes, options.map(([value, text, title = null]) => element("option", { value, text, title, selected: value === chosen })));
  select.addEventListener("change", () => changed(select.value));
  return select;
}

function swatch(colour, dashes) {
  const line = svg("svg", { width: 26, height: 10, "aria-hidden": "true" });
  line.append(svg("path", { d: "M1 5H25", stroke: colour, "stroke-width": 3, "stroke-dasharray": dashed(dashes, 2) }));
  return line;
}

// One of several [value, text]: radio buttons that look like one row.
function choice(label, options, chosen, changed) {
  const parts = options.map(([value, text]) => {
    const input = element("input", { type: "radio", name: label, value, checked: value === chosen, onchange: () => changed(value) });
    return element("label", {}, [input, element("span", { text })]);
  });
  return element("fieldset", { class: "choice" }, [element("legend", { text: label }), ...parts]);
}

// Names as options that are called as they are.
function asOptions(names) {
  return names.map((name) => [name, name]);
}

// A cell of a table, as {text, value, node}; text alone will do.
function asCell(content) {
  const { text, node, value = text } = content !== null && typeof content === "object" ? content : { text: content };
  return { text: text ?? "–", node, value: value ?? "" };
}

// A table that its headings sort, and below it a button that saves it as CSV. `terms` defines the headings; those in
// `unprinted` have no room on paper.
function table(name, heads, rows, { caption = "", chosen = -1, terms = PAGE.terms.sites, unprinted = [] } = {}) {
  const shape = (text, column) => [
    column && NUMBER.test(text) ? "number" : String(text).length > WIDE ? "wide" : "",
    unprinted.includes(heads[column]) ? "unprinted" : "",
  ].filter(Boolean).join(" ") || null;
  const cells = rows.map((row) => row.map(asCell));
  const lines = cells.map((row, place) => element("tr", { "aria-current": place === chosen ? "true" : null }, row.map(({ text, node }, column) => (
    element("td", { class: shape(text, column) }, [node || visible(text)])))));
  const head = heads.map((text, column) => element("th", { scope: "col", class: shape(cells.length ? cells[0][column].text : "", column) }, [
    button(visible(text), () => sort(column), { title: terms[text] || terms[text.slice(text.indexOf(" ") + 1)] || null }),
  ]));
  const body = element("tbody", {}, lines);
  const sort = (column) => {
    const falling = head[column].getAttribute("aria-sort") === "ascending";
    for (const cell of head) cell.removeAttribute("aria-sort");
    head[column].setAttribute("aria-sort", falling ? "descending" : "ascending");
    body.append(...sorted(cells.map((row) => row[column].value), falling).map((place) => lines[place]));
  };
  const save = () => download(new Blob([csv([heads, ...rows])], { type: "text/csv" }), name, "csv");
  const tools = element("p", { class: "tools" }, [button("Save CSV", save, { "aria-label": `Save CSV of ${name}` })]);
  const whole = element("table", {}, [element("caption", { class: "unseen", text: name }), element("thead", {}, [element("tr", {}, head)]), body]);
  const scrolls = element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": name }, [whole]);
  return element("div", { class: "tabled" }, [scrolls, caption ? remark(caption) : null, tools]);
}

// Places of values in their order: numbers, then words, then what is missing, which is last in a falling order too.
function sorted(values, falling) {
  const rank = (value) => (value === "" || value === "–" ? 2 : Number.isNaN(Number(value)) ? 1 : 0);
  const compared = (one, other) => (rank(one) || rank(other) ? String(one).localeCompare(other) : one - other);
  return Array.from(values.keys()).sort((first, second) => {
    const [one, other] = [values[first], values[second]];
    return rank(one) - rank(other) || (falling ? compared(other, one) : compared(one, other));
  });
}

// A table as CSV, with the numbers as they are where a cell knows them; a text that a spreadsheet would run is quoted.
function csv(rows) {
  return rows.map((row) => row.map((content) => {
    const text = String(asCell(content).value);
    const safe = /^[=+@\t\r-]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }).join(",")).join("\n");
}

// Replaces what is in a part of the page; the focus outlasts its element.
function refill(parent, children) {
  const named = (node) => node.id || node.getAttribute("aria-label");
  const { activeElement } = document;
  const name = activeElement !== parent && parent.contains(activeElement) && named(activeElement);
  parent.replaceChildren(...children);
  if (!name) return;
  const same = [...parent.querySelectorAll("button, select, input, [tabindex]")].find((node) => named(node) === name);
  (same && !same.disabled ? same : document.getElementById("main")).focus({ preventScroll: true });
}

function say(text) {
  document.getElementById("said").textContent = text;
}

function download(content, name, suffix) {
  const file = `${name.replace(/[^\w.]+/g, "-").slice(0, 100)}.${suffix}`;
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  say(`${file} saved`);
}

// A ramp of colours between what its ends stand for, as a key.
function ramp(low, colours, high) {
  const made = element("span", { class: "ramp" });
  made.style.background = `linear-gradient(to right, ${colours.map(rgb).join(", ")})`;
  return [element("span", { text: low }), made, element("span", { text: high })];
}

function keyDot(colour, text) {
  const dotted = element("span", { class: "dot" });
  dotted.style.background = colour;
  return element("span", { class: "key" }, [dotted, text]);
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
  const whole = element("figure", {}, [caption, host, note ? remark(note) : null]);
  return { whole, plot };
}
