#include <kda/kda.h>

int version_matches(void) {
  return kda_version() == ((KDA_VERSION_MAJOR << 16) | (KDA_VERSION_MINOR << 8) | KDA_VERSION_PATCH);
}
