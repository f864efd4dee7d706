"use strict";
// A click on a column's header sorts the table by it; a second click reverses the order.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");  // Unknown values come last.
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return descending ? -order : order;
      };
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
    });
  });
}
