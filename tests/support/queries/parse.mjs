// Parse queries: [[language, query], ...] on standard input, one answer each on
// standard output: "" where it parses, else what stands at the first thing that does
// not. Run in the folder that has the grammars.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "package.json"));
const parsers = {
  loki: require("@grafana/lezer-logql").parser,
  tempo: require("@grafana/lezer-traceql").parser,
};

function complaint([language, query]) {
  let found = "";
  parsers[language].parse(query).iterate({
    enter: (node) => {
      if (node.type.isError && !found) {
        const at = Math.max(node.from - 10, 0);
        found = `at ${node.from}: ...${query.slice(at, node.to + 20)}`;
      }
    },
  });
  return found;
}

const queries = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(queries.map(complaint)));
