// A compiler that makes of every program a list of its kernels, which is all that the fake driver looks at.
#include <cstring>
#include <string>

namespace {
struct Program {
  std::string code, log;
};
long compiled = 0, broken = 0;
}  // namespace

extern "C" {
void fake_set(const char* what, long value) {
  if (!strcmp(what, "broken")) broken = value;
}
long fake_calls(const char*) { return compiled; }

int nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = 9, 0; }
int nvrtcGetNumSupportedArchs(int* n) { return *n = 2, 0; }
int nvrtcGetSupportedArchs(int* archs) { return archs[0] = 80, archs[1] = 90, 0; }
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  return *program = new Program, 0;
}
int nvrtcDestroyProgram(void** program) { return delete (Program*)*program, *program = nullptr, 0; }
int nvrtcCompileProgram(void* program, int n, const char* const* options) {
  Program& p = *(Program*)program;
  compiled++;
  if (broken) return p.log = "kt.cu(1): error: expected a ;", 6;
  std::string format, arch;
  for (int i = 0; i < n; i++) {
    const std::string option = options[i];
    if (!option.rfind("-DKT_FORMAT=", 0)) format = option.substr(12);
    if (!option.rfind("--gpu-architecture=", 0)) arch = option.substr(19);
  }
  p.code = ".target sm_" + arch.substr(arch.find('_') + 1) + "\n";
  if (format == "rows")
    for (auto name : {"kt_inputs", "kt_outputs", "kt_add", "kt_group"}) p.code += std::string(".entry ") + name + "(\n";
  else
    for (auto name : {"kt_few_gate_up_", "kt_few_down_", "kt_many_gate_up_", "kt_many_down_"})
      p.code += ".entry " + (name + format) + "(\n";
  return 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* n) { return *n = ((Program*)program)->log.size() + 1, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return strcpy(log, ((Program*)program)->log.c_str()), 0; }
int nvrtcGetCUBINSize(void* program, size_t* n) { return *n = ((Program*)program)->code.size(), 0; }
int nvrtcGetCUBIN(void* program, char* code) { return memcpy(code, ((Program*)program)->code.data(), ((Program*)program)->code.size()), 0; }
int nvrtcGetPTXSize(void* program, size_t* n) { return *n = ((Program*)program)->code.size() + 1, 0; }
int nvrtcGetPTX(void* program, char* code) { return strcpy(code, ((Program*)program)->code.c_str()), 0; }
}
