// The axis as a file: the same drawing, with the colours that it has on the page written into it.
const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "paint-order", "font-size", "font-weight", "font-family"];

export function savePicture(svg, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([pictureOf(svg)], { type: "image/svg+xml" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function pictureOf(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((one, i) => {
    const seen = getComputedStyle(one);
    for (const key of KEPT) to[i].setAttribute(key, seen.getPropertyValue(key));
    for (const key of ["class", "id", "role", "aria-selected", "aria-hidden", "aria-label"]) to[i].removeAttribute(key);
  });
  copy.querySelectorAll("title").forEach((title) => [...title.attributes].forEach((one) => title.removeAttribute(one.name)));
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  for (const key of ["role", "tabindex", "aria-activedescendant", "aria-label"]) copy.removeAttribute(key);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const paper = document.createElementNS(svg.namespaceURI, "rect");
  for (const [key, value] of Object.entries({ width, height, fill: getComputedStyle(document.body).backgroundColor })) paper.setAttribute(key, value);
  copy.prepend(paper);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(copy)}\n`;
}
