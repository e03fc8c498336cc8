"use strict";
// Tables with class "sortable": a click on a heading sorts by the cells' data-sort, else by their text.
// Cells without a value (data-sort="") stay at the end either way: unknown is not the smallest number.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (a === "" || b === "") return (a === "") - (b === "");
        const numbers = !isNaN(a) && !isNaN(b);
        const order = numbers ? a - b : a.localeCompare(b, undefined, { numeric: true });
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}
// Text boxes with class "filter" hide the rows of the table that they name in data-for.
for (const box of document.querySelectorAll("input.filter")) {
  const table = document.getElementById(box.dataset.for);
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase();
    for (const row of table.tBodies[0].rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
}
