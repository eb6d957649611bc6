"use strict";
const $ = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
document.documentElement.classList.add("js");

// Theme: the system's, until the reader selects the other one.
const dark = () => document.documentElement.dataset.theme
  ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const nameTheme = () => { $("#theme").textContent = dark() ? "Light" : "Dark"; };
$("#theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  nameTheme();
});
nameTheme();

// Tables: a click on a heading sorts, a second click reverses the order; cells without a value stay last.
for (const button of all("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const first = head.dataset.first || "ascending", second = first === "ascending" ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? second : first;
  for (const th of all("th", table)) th.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const value = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent.trim();
  const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  const sign = order === "ascending" ? 1 : -1;
  [...body.rows].sort((p, q) => {
    const a = value(p), b = value(q);
    return a === "" || b === "" ? (a === "") - (b === "") : sign * compare(a, b);
  }).forEach((row) => body.append(row));
});
