"use strict";
// A check: a verdict and a sentence for each question, and below it the numbers of all sites, folded.

function checkView() {
  const { check } = open.capture;
  const note = "ok, a note, a problem or omitted; open a question for the numbers of its sites.";
  return [section("h2", "Check", check.length ? [remark(`Will these norms survive a change? Each answer is ${note}`), ...check.map(answered)] : [remark("This capture was not checked.")], "check")];
}

function answered({ question, verdict, sentence, sites }) {
  const head = [
    element("span", { class: "verdict", "data-verdict": verdict, text: verdict }), " ",
    element("strong", { text: `${visible(question)}: ` }),
    ...visible(sentence).split("`").map((text, place) => element(place % 2 ? "code" : "span", { text })),
  ];
  if (!sites.length) return element("div", { class: "answer" }, head);
  const names = Object.keys(sites[0]);
  const rows = sites.map((row) => names.map((name) => (name === "site" ? siteLink(row.site) : valueCell(row[name]))));
  const numbers = table(`${question} by site`, names.map((name) => name.replaceAll("_", " ")), rows);
  return element("details", { class: "answer" }, [element("summary", {}, head), numbers]);
}

function siteLink(name) {
  const place = open.capture.sites.findIndex((site) => site.name === name);
  if (place < 0) return name;
  return { text: name, node: button(visible(name), () => go({ view: "site", site: place }), { class: "link" }) };
}

function valueCell(value) {
  if (typeof value === "number") return cell(value, Number.isInteger(value) ? grouped : short);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (value !== null && typeof value === "object") return Object.entries(value).map(([name, part]) => (Array.isArray(value) ? part : `${name} ${part}`)).join(", ");
  return value;
}
