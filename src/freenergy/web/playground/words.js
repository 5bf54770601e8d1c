// Numbers as people read them, elements and tables.
export function number(value, digits = 2) {
  return value === null ? "∞" : value.toFixed(digits).replace("-", "−");
}

export function signed(value, digits = 2) {
  return (value > 0 ? "+" : "") + number(value, digits);
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

export function byId(id) {
  return document.getElementById(id);
}

// An element with text in it. Text is never read as HTML.
export function element(tag, { text = "", name = "", ...attributes } = {}, children = []) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Tables as the report has them: one that is too wide scrolls by itself, by pointer or keyboard.
export function table(caption, columns, rows, { words = [], wordsFirst = false, main = () => false } = {}) {
  const isWords = (i) => words.includes(i) || (wordsFirst && i === 0);
  const head = columns.map((text, i) => element("th", { text, scope: "col", ...(isWords(i) && { name: "words" }) }));
  const body = rows.map((row, r) => {
    const cells = row.map((text, i) => {
      const inside = isWords(i) ? [element("bdi", { text })] : [text];
      const name = isWords(i) ? { name: "words" } : {};
      return element(i ? "td" : "th", { ...(i ? {} : { scope: "row" }), ...name }, inside);
    });
    return element("tr", main(r) ? { name: "main" } : {}, cells);
  });
  const made = element("table", {}, [
    element("caption", {}, [element("span", { text: caption })]),
    element("thead", {}, [element("tr", {}, head)]),
    element("tbody", {}, body),
  ]);
  return element("div", { name: "scroll", role: "region", "aria-label": caption, tabindex: 0 }, [made]);
}
