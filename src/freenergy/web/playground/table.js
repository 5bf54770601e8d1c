// Tables as the report has them: one that is too wide scrolls by itself, by pointer or keyboard.
import { element } from "./words.js";

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
