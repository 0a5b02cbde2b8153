"use strict";
// Text from data only ever becomes textContent, so that it cannot be markup.
(() => {
  const COLOURS = 6;

  function element(name, classes, text) {
    const made = document.createElement(name);
    if (classes) made.className = classes;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  async function fetchJson(url) {
    const answer = await fetch(url);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  // A viewer shows one row of one item. An item is a step or a document. Its rows are in the page,
  // or it has a URL from which each row is fetched.
  function startViewer(root) {
    const find = (name) => root.querySelector(name);
    const items = JSON.parse(find(".items").textContent);
    const [chooser, rows, tokens] = [find(".item"), find(".row"), find(".tokens")];
    const [previous, next, detail] = [find(".previous"), find(".next"), find(".detail")];
    const noun = root.dataset.noun;
    const hint = detail.textContent;
    let pieces = [];
    let row = null;
    let chosen = -1;
    let asked = 0;

    function addItem(item) {
      items.push(item);
      chooser.append(element("option", "", item.label));
    }

    function describe(number) {
      const [count, text, trained, place] = pieces[number];
      const first = pieces.slice(0, number).reduce((sum, each) => sum + each[0], 0);
      const ids = row.ids.slice(first, first + count).join(" ");
      const named = place < 0 ? "" : ` · ${row.documents[place] ?? ""}`;
      const quoted = text === null ? "" : ` · ${JSON.stringify(text)}`;
      const state = trained ? "trained on" : "read, not trained on";
      const which = count > 1 ? `tokens ${first} to ${first + count - 1}` : `token ${first}`;
      return `${which} · id ${ids}${quoted} · ${state}${named}`;
    }

    function choose(number) {
      if (!pieces.length) return;
      tokens.children[chosen]?.removeAttribute("aria-selected");
      chosen = Math.max(0, Math.min(pieces.length - 1, number));
      const span = tokens.children[chosen];
      span.setAttribute("aria-selected", "true");
      tokens.setAttribute("aria-activedescendant", span.id);
      const [top, bottom] = [span.offsetTop, span.offsetTop + span.offsetHeight];
      if (top < tokens.scrollTop) tokens.scrollTop = top - 8;
      if (bottom > tokens.scrollTop + tokens.clientHeight) tokens.scrollTop = bottom - tokens.clientHeight + 8;
      detail.textContent = describe(chosen);
    }

    // The nearest token of the line above (-1) or below (1).
    function lineFrom(number, direction) {
      const from = tokens.children[Math.max(0, number)];
      let best = number;
      let line = null;
      for (let at = number + direction; at >= 0 && at < pieces.length; at += direction) {
        const each = tokens.children[at];
        if (each.offsetTop === from.offsetTop) continue;
        if (line === null) line = each.offsetTop;
        if (each.offsetTop !== line) break;
        const distance = (one) => Math.abs(one.offsetLeft - from.offsetLeft);
        if (best === number || distance(each) < distance(tokens.children[best])) best = at;
      }
      return best;
    }

    function show(label, found) {
      row = found;
      pieces = found.pieces;
      chosen = -1;
      const spans = pieces.map(([, text, trained, place], number) => {
        const begins = number > 0 && pieces[number - 1][3] !== place ? " begins" : "";
        const colour = `c${Math.max(0, place) % COLOURS}${begins}${trained ? "" : " untrained"}`;
        const shown = text === null ? `${found.ids[number]} ` : text.replaceAll("\n", "↵\n");
        const span = element("span", colour, shown === "" ? "∅" : shown);
        span.id = `${root.dataset.kind}-${number}`;
        span.setAttribute("role", "option");
        return span;
      });
      tokens.replaceChildren(...spans);
      tokens.scrollTop = 0;
      tokens.removeAttribute("aria-activedescendant");
      find(".row-title").textContent = found.note ? `${found.title} (${found.note})` : found.title;
      const list = found.documents.map((text, number) => {
        const line = element("li");
        line.append(element("span", `c${number % COLOURS}`, text));
        return line;
      });
      find(".documents").replaceChildren(...list);
      detail.textContent = hint;
      detail.classList.remove("failed");
    }

    function fillRows(count) {
      const names = Array.from({ length: count }, (_, number) => element("option", "", `${number}`));
      rows.replaceChildren(...names);
      find(".row-label").hidden = count < 2;
    }

    async function open(number, at) {
      const item = items[number];
      if (!item) return;
      const turn = ++asked;
      chooser.selectedIndex = number;
      previous.disabled = number === 0;
      next.disabled = number === items.length - 1;
      try {
        let found = item.rows?.[at];
        let count = item.rows?.length;
        if (item.url) {
          const answer = await fetchJson(`${item.url}/${at}`);
          [found, count] = [answer.row, answer.num_rows];
          item.label = answer.label;
          chooser.options[number].textContent = answer.label;
        }
        if (turn !== asked) return; // a later choice was faster
        if (rows.length !== count) fillRows(count);
        rows.selectedIndex = at;
        show(item.label, found);
      } catch (error) {
        detail.textContent = error.message;
        detail.classList.add("failed");
      }
    }

    tokens.addEventListener("click", (event) => {
      const span = event.target.closest("[role=option]");
      if (span) choose([...tokens.children].indexOf(span));
    });
    tokens.addEventListener("keydown", (event) => {
      const moves = {
        ArrowRight: () => chosen + 1,
        ArrowLeft: () => chosen - 1,
        ArrowDown: () => lineFrom(chosen, 1),
        ArrowUp: () => lineFrom(chosen, -1),
        Home: () => 0,
        End: () => pieces.length - 1,
      };
      const move = moves[event.key];
      if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(move());
    });
    chooser.addEventListener("change", () => open(chooser.selectedIndex, 0));
    rows.addEventListener("change", () => open(chooser.selectedIndex, rows.selectedIndex));
    previous.addEventListener("click", () => open(chooser.selectedIndex - 1, 0));
    next.addEventListener("click", () => open(chooser.selectedIndex + 1, 0));
    find(".go")?.addEventListener("submit", (event) => {
      event.preventDefault();
      const number = find(".number").value;
      const of = find(".corpus");
      const name = of && of.length > 1 ? `${of.selectedOptions[0].textContent}: ` : "";
      const url = `/${root.dataset.kind}/${of ? `${of.value}/` : ""}${number}`;
      addItem({ label: `${name}${noun} ${number}`, url });
      open(items.length - 1, 0);
    });
    for (const item of items.splice(0)) addItem(item);
    open(0, 0);
  }

  function startAll(root) {
    root.querySelectorAll(".viewer").forEach(startViewer);
  }

  // A served page fetches its sections one by one, so that the first is seen early.
  async function fetchSections(main) {
    const waiting = main.querySelector(".waiting");
    try {
      const list = await fetchJson("/sections");
      const links = document.querySelector("nav ul");
      for (const { name, title } of list) {
        const item = element("li");
        const link = element("a", "", title);
        link.href = `#${name}`;
        item.append(link);
        links.append(item);
        const section = element("section");
        section.id = name;
        section.setAttribute("aria-labelledby", `${name}-title`);
        const heading = element("h2", "", title);
        heading.id = `${name}-title`;
        section.append(heading, element("p", "note", "Measuring …"));
        main.append(section);
      }
      waiting.remove();
      for (const { name } of list) {
        const section = document.getElementById(name);
        try {
          const { html } = await fetchJson(`/sections/${name}`);
          section.lastChild.remove();
          // The server has escaped all text of it, as it does for a page in a file.
          section.insertAdjacentHTML("beforeend", html);
          startAll(section);
        } catch (error) {
          section.lastChild.textContent = error.message;
          section.lastChild.className = "failed";
        }
      }
    } catch (error) {
      waiting.textContent = error.message;
      waiting.className = "failed";
    }
    main.setAttribute("aria-busy", "false");
  }

  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((each) => (each.open = true));
  });
  const main = document.getElementById("main");
  if (main.dataset.live) fetchSections(main);
  else startAll(main);
})();
