"use strict";
// A training: the figures of its timeline, and its first and last step as a table.

function trainingView() {
  const { about, figures, tables } = PAGE.training;
  const drawn = figures.map((image) => element("figure", {}, [
    element("figcaption", {}, [element("h3", { text: image.label })]), element("img", { src: image[palette.theme], alt: image.label }),
  ]));
  const ends = tables.map(({ name, heads, rows }) => table(`First and last step of ${name}`, heads, rows, { caption: "From the first step to the last.", terms: PAGE.terms.training }));
  return [section("h2", "Training", [remark(visible(Object.values(about).join(" · "))), ...drawn, ...ends])];
}
