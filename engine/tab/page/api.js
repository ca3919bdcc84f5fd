/** What the page asks of the server that it came from. Addresses are relative, so a path prefix changes nothing. */

async function json(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

const address = (route, parameters) => `${route}?${new URLSearchParams(parameters)}`;

/** { palette, runs: [{ name, steps: [{ step, seconds, shares }] }] } */
export const fetchRuns = () => json("runs");

/** Everything that is drawn of one step. */
export const fetchStep = (run, step) => json(address("step", { run, step }));

/** Where the browser finds the same step as a trace for Perfetto. */
export const traceAddress = (run, step) => address("trace", { run, step });
